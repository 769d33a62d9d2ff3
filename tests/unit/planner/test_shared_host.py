"""Workers of one host: how their steps take turns with its cores, by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from planner.shared_host import BusyCores, Contention, HostCores
from planner.simulator.events import EventLoop
from tandem.errors import ConfigError

HOST = HostCores(2, Contention(1.2, 1.2, 1.2, 1.2))
BY_KIND = HostCores(2, Contention(1.0, 1.1, 1.2, 1.5))


@pytest.mark.parametrize(
    ("host", "stretches"),
    [
        (HostCores(1), [1, 2, 3, 4]),
        (HOST, [1, 1.2, 1.8, 2.4]),
        (HostCores(4), [1, 1, 1, 1, 1.25]),
        (HostCores(4, Contention(1.3, 1.3, 1.3, 1.3)), [1, 1.1, 1.2, 1.3, 1.625]),
        (HostCores(2, idle_cores=0.4), [1, 1.25, 1.875]),
    ],
    ids=["one core", "two", "four without contention", "four", "two with other work"],
)
def test_stretch(host: HostCores, stretches: list[float]) -> None:
    assert [host.stretch(1 + at) for at in range(len(stretches))] == pytest.approx(stretches)


@pytest.mark.parametrize("name", ["request_s", "frame_s", "token_s", "handoff_s", "kv_byte_s"])
def test_processes_take_no_negative_or_endless_time(name: str) -> None:
    for value in (-0.001, float("nan"), float("inf")):
        cost: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=f"host: {name}: expected seconds"):
            replace(HostCores(2), **cost)


@pytest.mark.parametrize("idle_cores", [-0.1, 1.9, float("nan")])
def test_other_work_leaves_part_of_the_cores(idle_cores: float) -> None:
    with pytest.raises(ConfigError, match="host: idle_cores: expected fewer than the cores"):
        HostCores(2, idle_cores=idle_cores)


@pytest.mark.parametrize(
    ("decoding", "others", "factor"),
    [(0, 0, 1.0), (0, 1, 1.1), (1, 0, 1.2), (1, 1, 1.5), (0.5, 1, 1.3), (1, 0.5, 1.35), (0.5, 0.5, 1.2)],
)
def test_decoding_and_prompts_disturb_each_other_by_kind(decoding: float, others: float, factor: float) -> None:
    assert BY_KIND.stretch(2, decoding, others) == pytest.approx(factor)
    assert BY_KIND.stretch(3, decoding, others) == pytest.approx(1.5 * factor)
    assert BY_KIND.stretch(1, decoding, others) == 1.0


def test_what_no_host_is() -> None:
    with pytest.raises(ConfigError, match="host: cores: expected at least 1, got 0"):
        HostCores(0)
    for value in (0.9, float("nan")):
        with pytest.raises(ConfigError, match="host: contention: decoding_beside_prompts: expected at least 1"):
            Contention(decoding_beside_prompts=value)


def ends(steps: dict[str, tuple[float, int, float]], stop: tuple[str, float] | None = None) -> dict[str, float]:
    """When steps end that are (begun at, ranks, seconds); `stop`: who is lost, and when."""
    loop, found = EventLoop(), {}
    cores = BusyCores(HOST, loop)

    def note(name: str) -> None:
        found[name] = loop.now_s()

    for name, (at_s, ranks, seconds) in steps.items():
        loop.call_at(at_s, cores.run, name, ranks, seconds, partial(note, name))
    if stop is not None:
        loop.call_at(stop[1], cores.stop, stop[0])
    loop.run(lambda: False)
    return found


def test_a_step_is_as_slow_as_there_are_others_at_each_moment() -> None:
    assert ends({"a": (0, 1, 1.0)}) == {"a": 1.0}
    # a alone for half a second, then both at 1 / 1.2 for 0.6 s, then b alone with half a second left.
    assert ends({"a": (0, 1, 1.0), "b": (0.5, 1, 1.0)}) == pytest.approx({"a": 1.1, "b": 1.6})
    assert ends({"a": (0, 1, 1.0), "b": (0, 2, 1.0)}) == pytest.approx({"a": 1.8, "b": 1.8})


def test_a_step_ends_by_what_it_and_the_others_compute() -> None:
    loop, found = EventLoop(), dict[str, float]()
    cores = BusyCores(BY_KIND, loop)
    for name, decoding in (("decoding", 1.0), ("prompts", 0.0)):
        cores.run(name, 1, 1.0, lambda name=name: found.update({name: loop.now_s()}), decoding)  # type: ignore[misc]
    loop.run(lambda: False)
    # Prompts take 1.1 s; of decoding 1.1 / 1.2 is done by then.
    assert found == pytest.approx({"prompts": 1.1, "decoding": 1.1 + (1 - 1.1 / 1.2)})


def test_who_is_lost_leaves_its_core() -> None:
    steps = {"a": (0.0, 1, 1.0), "b": (0.0, 1, 1.0)}
    assert ends(steps, stop=("b", 0.6)) == pytest.approx({"a": 1.1})


def test_what_other_processes_compute_takes_a_core_from_the_steps() -> None:
    loop, found = EventLoop(), dict[str, float]()
    cores = BusyCores(HostCores(1), loop)
    loop.call_at(0.0, cores.run, "a", 1, 1.0, lambda: found.update(a=loop.now_s()))
    loop.call_at(0.5, cores.spend, 0.1, lambda: found.update(b=loop.now_s()))
    loop.call_at(0.5, cores.spend, 0.0, lambda: found.update(nothing=loop.now_s()))
    loop.run(lambda: False)
    assert found == pytest.approx({"nothing": 0.5, "b": 0.7, "a": 1.1})
