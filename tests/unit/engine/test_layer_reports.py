"""Finished layers are reported in order, once the device has written them, while the host goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.engine.api import ExportRange
from tandem.engine.device.events import DONE, DeviceEvent
from tandem.engine.factory import Rank
from tandem.engine.layer_reports import LayerReports
from tandem.errors import InternalError
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver
from tandem.testing.models import random_prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
TIMEOUT_S = 10.0


@dataclass
class Noted:
    """An exporter that notes its calls."""

    calls: list[str] = field(default_factory=list)
    called: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    refused: str = ""

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self._note(f"begin {len(ranges)}")

    def layer_done(self, layer: int) -> None:
        self._note(f"layer {layer}")

    def _note(self, call: str) -> None:
        if call == self.refused:
            raise ValueError("the agent's queue is full")
        self.calls.append(call)
        self.called.release()


@dataclass
class Device:
    """Its events are done when the test says so."""

    events: list[threading.Event] = field(default_factory=list)
    failure: str | None = None

    def record(self) -> DeviceEvent:
        event = threading.Event()
        self.events.append(event)

        class Held:
            def synchronize(held) -> None:
                assert event.wait(TIMEOUT_S)
                if self.failure is not None:
                    raise RuntimeError(self.failure)

        return Held()

    def finish(self) -> None:
        for event in self.events:
            event.set()


def test_a_report_waits_for_its_event_and_the_host_does_not() -> None:
    noted, device = Noted(), Device()
    reports = LayerReports(noted, device.record)
    reports.begin_step([])
    reports.layer_done(0)
    reports.layer_done(1)
    assert noted.calls == []
    device.events[0].set()
    device.events[2].set()  # a later layer's event alone reports nothing
    assert noted.called.acquire(timeout=TIMEOUT_S)
    assert not noted.called.acquire(timeout=0.05)
    assert noted.calls == ["begin 0"]
    device.events[1].set()
    reports.flush()
    assert noted.calls == ["begin 0", "layer 0", "layer 1"]


@pytest.mark.parametrize("cause", ["device", "exporter"])
def test_the_engine_learns_of_a_failure_and_nothing_is_reported_after_it(cause: str) -> None:
    noted, device = Noted(), Device()
    reports = LayerReports(noted, device.record)
    if cause == "device":
        device.failure = "an illegal memory access"
    else:
        noted.refused = "layer 0"
    reports.layer_done(0)
    device.finish()
    for _ in range(2):  # and again: the device does not recover
        with pytest.raises(InternalError, match=r"illegal memory access|queue is full"):
            reports.flush()
        device.failure = None
        reports.layer_done(1)
    assert noted.calls == []


def test_without_events_reports_are_made_at_once_by_the_caller() -> None:
    noted = Noted()
    reports = LayerReports(noted, None)
    reports.layer_done(3)
    assert noted.calls == ["layer 3"]
    reports.flush()


@pytest.mark.parametrize("held_back", [False, True])
def test_a_step_that_exports_is_launched_before_its_layers_are_written(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, held_back: bool
) -> None:
    """The whole step is launched while its events are held back; its result waits for the reports."""
    monkeypatch.setattr("tandem.engine.runner.REPORT_BYTES", 1)
    rank, noted, device = make(), Noted(), Device()
    rank.runner._reports = LayerReports(noted, device.record if held_back else lambda: DONE)
    plain = rank.runner.launch

    def launch(step: Any) -> Any:
        launched = plain(step)
        assert not held_back or noted.calls == []
        device.finish()
        return launched

    monkeypatch.setattr(rank.runner, "launch", launch)
    driver = EngineDriver(rank.engine)
    driver.add("r", random_prompt(40, 300, 1), GREEDY, export_from_block=0)
    driver.take(driver.engine.step())
    assert noted.calls == ["begin 1", "layer 0", "layer 1"]
    assert driver.ends == {"r": None}


def test_a_failed_report_ends_the_step(make: Callable[..., Rank]) -> None:
    rank, noted = make(), Noted(refused="layer 1")
    rank.runner._reports = LayerReports(noted, lambda: DONE)
    driver = EngineDriver(rank.engine)
    driver.add("r", random_prompt(40, 300, 1), GREEDY, export_from_block=0)
    with pytest.raises(InternalError, match="could not be reported"):
        driver.engine.step()
