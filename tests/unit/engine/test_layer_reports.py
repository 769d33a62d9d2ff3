"""Finished layers are reported in order, once the device has written them, while the host goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.engine.device.events import DONE, DeviceEvent
from tandem.engine.factory import Rank
from tandem.engine.layer_reports import LayerReports
from tandem.errors import HandoffError, InternalError
from tandem.request import SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver
from tandem.testing.models import random_prompt


def range_of(request_id: str) -> ExportRange:
    return ExportRange(request_id, 0, (1,), 16, in_cache=False, is_last=True)


GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
TIMEOUT_S = 60.0


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

    failure: str | None = None
    events: list[threading.Event] = field(default_factory=list)

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
    reports.begin_step([range_of("r")])
    reports.layer_done(0)
    reports.layer_done(1)
    assert noted.calls == []
    device.events[0].set()
    device.events[2].set()  # a later layer's event alone reports nothing
    assert noted.called.acquire(timeout=TIMEOUT_S)
    assert not noted.called.acquire(timeout=0.05)
    assert noted.calls == ["begin 1"]
    device.events[1].set()
    reports.flush()
    assert noted.calls == ["begin 1", "layer 0", "layer 1"]


def test_the_engine_learns_of_a_failed_device_and_nothing_is_reported_after_it() -> None:
    noted, device = Noted(), Device("an illegal memory access")
    reports = LayerReports(noted, device.record)
    reports.begin_step([range_of("r")])
    device.finish()
    for _ in range(2):  # and again: the device does not recover
        with pytest.raises(InternalError, match="illegal memory access"):
            reports.flush()
        device.failure = None
        reports.layer_done(1)
    assert noted.calls == []


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("refused", ["begin 2", "layer 0"])
def test_an_export_of_which_a_report_fails_is_reported_no_more_and_others_are(refused: str, at_once: bool) -> None:
    noted = Noted(refused=refused)
    reports = LayerReports(noted, None if at_once else lambda: DONE)
    reports.begin_step([range_of("a"), range_of("b")])
    reports.layer_done(0)
    reports.layer_done(1)
    assert reports.flush() == {"a", "b"}
    assert reports.flush() == frozenset()
    noted.calls, noted.refused = [], ""
    reports.begin_step([range_of("a")])
    reports.layer_done(1)
    reports.begin_step([range_of("b"), range_of("c")])
    reports.layer_done(1)
    assert reports.flush() == frozenset()
    assert noted.calls == ["begin 1", "layer 1"]


def test_only_so_many_failed_exports_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.layer_reports.MAX_FAILED", 2)
    noted = Noted(refused="begin 1")
    reports = LayerReports(noted, None)
    for name in "abc":
        reports.begin_step([range_of(name)])
    noted.refused = ""
    for name in "abc":
        reports.begin_step([range_of(name)])
    assert noted.calls == ["begin 1"], "the first is known no more"


def test_without_events_reports_are_made_at_once_by_the_caller() -> None:
    noted = Noted()
    reports = LayerReports(noted, None)
    reports.begin_step([range_of("r")])
    reports.layer_done(3)
    assert noted.calls == ["begin 1", "layer 3"]
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


@pytest.mark.parametrize("refused", ["begin 1", "layer 0", "layer 1"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_report_ends_its_request_and_the_engine_goes_on(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, refused: str, at_once: bool
) -> None:
    monkeypatch.setattr("tandem.engine.runner.REPORT_BYTES", 1)
    rank, noted, other = make(), Noted(refused=refused), random_prompt(30, 300, 2)
    alone = EngineDriver(make().engine)
    alone.add("other", other, GREEDY)
    alone.run()
    rank.runner._reports = LayerReports(noted, None if at_once else lambda: DONE)
    driver = EngineDriver(rank.engine)
    driver.add("other", other, GREEDY)
    driver.take(driver.engine.step())
    driver.add("r", random_prompt(40, 300, 1), GREEDY, export_from_block=0)
    driver.run()
    assert isinstance(driver.ends["r"], HandoffError)
    assert "r" not in driver.tokens
    assert driver.tokens["other"] == alone.tokens["other"]
    noted.refused = ""
    driver.engine.cancel("r")
    driver.add("next", random_prompt(40, 300, 3), GREEDY, export_from_block=0)
    driver.run()
    assert driver.ends["next"] is None
    assert noted.calls[-3:] == ["begin 1", "layer 0", "layer 1"]
