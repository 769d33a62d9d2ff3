"""What a controller had begun: the next one continues it, and the record tells it until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cluster.control.record import DrainRecord, ScaleRecord, WorkerState
from cluster.control.scaling import pool_scaler
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.worker_slot import WorkerSlot
from cluster.control.workers import Workers
from tandem.config.spec import ControlSpec
from tests.unit.cluster.test_workers import FakeBackend, backend, info, workers

__all__ = ["backend", "workers"]  # fixtures

Change = ScaleRecord | DrainRecord


class Notes:
    """What the record told about changes under way, at each write; the first `failures` writes fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.written: list[tuple[Change, ...]] = []
        self.scaler: PoolScaler | None = None

    async def note(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("Ray does not answer")
        assert self.scaler is not None
        self.written.append(tuple(self.scaler.under_way))


def scaler_of(workers: Workers, notes: Notes, *changes: Change) -> PoolScaler:
    notes.scaler = PoolScaler(workers, ControlSpec(start_timeout_s=60), notes.note, poll_s=0.001)
    notes.scaler.under_way[:] = changes
    return notes.scaler


async def in_time(what: Awaitable[None]) -> None:
    async with asyncio.timeout(60):
        await what


def epoch_of(slot: WorkerSlot) -> object:
    """Another one for each epoch whose members have started."""
    return slot._restart_reason


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_scale_is_continued_and_a_second_change_is_not_lost_meanwhile(
    workers: Workers, backend: FakeBackend
) -> None:
    name = workers.model("").spec.served_name
    scale = ScaleRecord(model=name, prefill=1, decode=3)
    gone = DrainRecord(worker_id="decode-9", epoch=7, restart=False, move=True)
    notes = Notes()
    scaler = scaler_of(workers, notes, scale, gone)
    resuming = asyncio.create_task(scaler.resume())
    assert scaler.under_way == [scale, gone]
    await until(lambda: "decode-2" in backend.placed and backend.placed["decode-2"][0].starts > 0)
    assert notes.written == [(scale, gone)]
    workers.register(info(workers, "decode-2"))
    await in_time(resuming)
    assert (scaler.under_way, scaler.sizes("")) == ([], (1, 3))


async def test_a_restart_is_continued_if_it_had_not_come_to_the_next_epoch(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = workers.slots["decode-0"]
    await until(lambda: slot._restart_reason is not None)  # its members have started
    workers.register(info(workers, "decode-0"))
    before = slot.epoch
    restart = DrainRecord(worker_id="decode-0", epoch=before, restart=True, move=False)

    async def is_busy(slot: object) -> bool:
        return False

    scaler = scaler_of(workers, Notes(), restart)
    monkeypatch.setattr(scaler, "_is_busy", is_busy)
    started = epoch_of(slot)
    resuming = asyncio.create_task(scaler.resume())
    await until(lambda: slot.epoch != before and epoch_of(slot) is not started)
    workers.register(info(workers, "decode-0"))
    await in_time(resuming)
    assert (slot.restarts, slot.state, scaler.under_way) == (1, WorkerState.READY, [])
    await scaler_of(workers, Notes(), restart).resume()  # its epoch has ended: it was done
    assert slot.restarts == 1


async def test_what_fails_by_a_backend_that_is_restarting_is_tried_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_scaler, "RESUME_DELAY_S", 0.001)
    name = workers.model("").spec.served_name
    scale = ScaleRecord(model=name, prefill=1, decode=2)
    notes = Notes(failures=3)
    scaler = scaler_of(workers, notes, scale)
    await in_time(scaler.resume())
    assert notes.written == [(scale,)]
    assert "attempt 3 of 10" in caplog.text
    assert scaler.under_way == []
    notes.failures = 1000
    scaler.under_way[:] = [scale]
    await in_time(scaler.resume())  # it does not try for ever
    assert scaler.under_way == []


async def test_a_change_that_cannot_be_made_is_told_and_the_next_is_made(
    workers: Workers, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    name = workers.model("").spec.served_name
    first, second = ScaleRecord(model="none", prefill=1, decode=1), ScaleRecord(model=name, prefill=1, decode=2)
    notes = Notes()
    scaler = scaler_of(workers, notes, first, second)
    await in_time(scaler.resume())
    assert "could not be continued: model: expected one of" in caplog.text
    assert notes.written == [(second,)]
