"""The restart of all workers is the controller's: recorded, continued by the next one, each worker restarted once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.control import rolling_restart
from cluster.control.record import RestartRecord, WorkerState
from cluster.control.rolling_restart import RollingRestart
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.worker_slot import WorkerSlot
from cluster.control.workers import Workers
from tandem.checkpoint.adapter import Adapter
from tandem.config.spec import ControlSpec
from tandem.errors import ConfigError, UnavailableError
from tandem.v1 import worker_pb2
from tests.unit.cluster.test_workers import backend, info, workers

__all__ = ["backend", "workers"]  # fixtures
IDS = ["prefill-0", "decode-0", "decode-1"]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class RouterInPlace:
    name: str
    restarts: int = 0


class StandInRouters:
    """Two of them, which restart at once."""

    def __init__(self) -> None:
        self.slots = [RouterInPlace("router-0"), RouterInPlace("router-1")]

    async def restart(self, name: str, restarts: int) -> None:
        (slot,) = (each for each in self.slots if each.name == name)
        if slot.restarts == restarts:
            slot.restarts += 1


async def kept() -> None:
    """Keeps nothing."""


async def ready(workers: Workers) -> None:
    slots = workers.slots.values()
    await until(lambda: all(slot._restart_reason is not None for slot in slots))  # their members have started
    for slot in slots:
        workers.register(info(workers, slot.worker_id))


def restart_of(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, note: Callable[[], Awaitable[None]] = kept
) -> RollingRestart:
    async def is_busy(slot: object) -> bool:
        return False

    scaler = PoolScaler(workers, ControlSpec(start_timeout_s=60), poll_s=0.001)
    monkeypatch.setattr(scaler, "_is_busy", is_busy)
    return RollingRestart(workers, StandInRouters(), scaler, note)  # type: ignore[arg-type]


def record_of(restart: RollingRestart) -> RestartRecord:
    assert restart.record is not None
    return restart.record


async def back(workers: Workers, restart: RollingRestart, worker_id: str) -> None:
    """Registers the worker's next epoch when it has begun."""
    slot = workers.slots[worker_id]
    old = record_of(restart).epochs[worker_id]
    await until(lambda: slot.epoch != old and slot._restart_reason is not None and not slot._restart_reason.done())
    workers.register(info(workers, worker_id))


async def test_workers_restart_in_turn_and_a_second_restart_is_refused_meanwhile(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(workers)
    restart = restart_of(workers, monkeypatch)
    assert restart.status().restart_id == ""
    with pytest.raises(ConfigError, match="model: expected one of"):
        await restart.begin("none", move=True)
    await restart.begin("", move=True)
    assert list(restart.status().worker_ids) == IDS
    for number, worker_id in enumerate(IDS):
        with pytest.raises(ConfigError, match=rf"a restart of 3 workers is under way, {number} of them are done"):
            await restart.begin("", move=True)
        others = [each for each in IDS if each != worker_id]
        assert all(workers.slots[each].state is WorkerState.READY for each in others)
        await back(workers, restart, worker_id)
        await until(lambda: len(record_of(restart).restarted) > number)  # noqa: B023 - awaited here
    await until(lambda: restart.status().is_over)
    assert restart.status().failure == ""
    assert [slot.restarts for slot in workers.slots.values()] == [1, 1, 1]
    await restart.begin("", move=True)  # the next one
    assert not restart.status().is_over
    await restart.close()


async def test_routers_restart_first_and_once_also_by_the_next_controller(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(workers)
    first = restart_of(workers, monkeypatch)
    await first.begin("", move=True, routers=True)
    routers = ["router-0", "router-1"]
    assert (list(first.status().router_ids), list(first.status().worker_ids)) == (routers, IDS)
    await until(lambda: list(first.status().restarted) == routers)
    with pytest.raises(ConfigError, match="a restart of 5 routers and workers is under way, 2 of them are done"):
        await first.begin("", move=True)
    assert all(slot.state is not WorkerState.RESTARTING for slot in list(workers.slots.values())[1:])
    await first.close()
    second = restart_of(workers, monkeypatch)
    second.record = record_of(first).model_copy(update={"restarted": ("router-0",)})  # not noted in time
    second._routers = first._routers
    second.resume()
    for worker_id in IDS:
        await back(workers, second, worker_id)
    await until(lambda: second.status().is_over)
    assert list(second.status().restarted) == [*routers, *IDS]
    assert [slot.restarts for slot in first._routers.slots] == [1, 1]


async def test_a_router_whose_backend_fails_is_tried_again_and_then_ends_it_with_the_reason(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling_restart, "RESUME_DELAY_S", 0.001)
    await ready(workers)
    restart = restart_of(workers, monkeypatch)
    asked: list[str] = []

    async def fails(name: str, restarts: int) -> None:
        asked.append(name)
        if len(asked) != 2:
            raise OSError("the GCS restarts")

    monkeypatch.setattr(restart._routers, "restart", fails)
    await restart.begin("", move=True, routers=True)
    await until(lambda: restart.status().is_over)
    assert asked[:2] == ["router-0", "router-0"]
    assert set(asked[2:]) == {"router-1"}
    assert restart.status().failure == "router-1 could not be restarted: the GCS restarts"
    assert [slot.restarts for slot in workers.slots.values()] == [0, 0, 0]


async def test_the_next_controller_goes_on_and_restarts_no_worker_twice(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(workers)
    first = restart_of(workers, monkeypatch)
    await first.begin("", move=False)
    await back(workers, first, "prefill-0")
    await until(lambda: "prefill-0" in record_of(first).restarted)
    await until(lambda: workers.slots["decode-0"].epoch != record_of(first).epochs["decode-0"])
    await first.close()  # between the two epochs of decode-0
    second = restart_of(workers, monkeypatch)
    second.record = record_of(first)
    await workers.remove("decode-1")
    second.resume()
    await back(workers, second, "decode-0")
    await until(lambda: second.status().is_over)
    assert [slot.restarts for slot in workers.slots.values()] == [1, 1]
    assert (list(second.status().restarted), list(second.status().left)) == (IDS[:2], IDS[2:])
    third = restart_of(workers, monkeypatch)
    third.record = second.record
    third.resume()  # it is over
    assert third._task is None


async def test_a_worker_that_cannot_start_again_ends_it_with_the_reason(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(workers)
    restart = restart_of(workers, monkeypatch)
    await restart.begin("", move=True)
    await until(lambda: workers.slots["prefill-0"].state is WorkerState.RESTARTING)
    workers.slots["prefill-0"].refuse("its weights are gone")
    await until(lambda: restart.status().is_over)
    assert restart.status().failure == "prefill-0 cannot start: its weights are gone"
    assert [slot.restarts for slot in workers.slots.values()] == [1, 0, 0]


async def test_each_worker_loads_its_adapters_before_the_next_one_restarts(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else requests for an adapter would find no worker that has it."""
    states = {worker_id: worker_pb2.WorkerState() for worker_id in IDS}

    async def state(slot: WorkerSlot) -> worker_pb2.WorkerState:
        return states[slot.worker_id]

    monkeypatch.setattr(workers, "state", state)
    workers.directory.set_adapters("tiny", [Adapter("sql", Path("sql"), "f0", 8)])
    await ready(workers)
    restart = restart_of(workers, monkeypatch)
    await restart.begin("", move=True)
    await back(workers, restart, "prefill-0")
    await until(lambda: workers.slots["prefill-0"].state is WorkerState.READY)
    await asyncio.sleep(0.02)
    assert not restart.status().restarted
    states["prefill-0"].adapters.fingerprints.append("f0")
    await until(lambda: list(restart.status().restarted) == ["prefill-0"])
    await restart.close()


async def test_a_worker_that_cannot_load_an_adapter_is_named_with_the_reason(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has had time to try again."""
    failed = worker_pb2.WorkerState(failed_adapters={"f0": "sql: no such folder"})

    async def state(slot: WorkerSlot) -> worker_pb2.WorkerState:
        return failed

    monkeypatch.setattr(workers, "state", state)
    workers.directory.set_adapters("tiny", [Adapter("sql", Path("sql"), "f0", 8)])
    scaler = PoolScaler(workers, ControlSpec(start_timeout_s=0.05), poll_s=0.001)
    with pytest.raises(UnavailableError, match=r"decode-0 to load its model's adapters: .*no such folder"):
        await scaler._until_has_adapters(workers.slots["decode-0"])


async def test_nothing_begins_that_could_not_be_recorded(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def note() -> None:
        raise OSError("Ray does not answer")

    restart = restart_of(workers, monkeypatch, note)
    with pytest.raises(OSError, match="Ray does not answer"):
        await restart.begin("", move=True)
    assert restart.record is None


async def test_a_backend_that_is_restarting_is_tried_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rolling_restart, "RESUME_DELAY_S", 0.001)
    await ready(workers)
    restart = restart_of(workers, monkeypatch)
    asked: list[str] = []

    async def fails(worker_id: str, epoch: int, *, move: bool) -> bool:
        asked.append(worker_id)
        if len(asked) < 3 or worker_id == "decode-0":
            raise OSError("the GCS restarts")
        return True

    monkeypatch.setattr(restart._scaler, "restart", fails)
    await restart.begin("", move=True)
    await until(lambda: restart.status().is_over)
    assert asked == ["prefill-0"] * 3 + ["decode-0"] * 10
    assert restart.status().failure == "decode-0 could not be restarted: the GCS restarts"
    assert "attempt 10 of 10" in caplog.text
