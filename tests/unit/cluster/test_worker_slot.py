"""One worker's epochs: when it restarts, when it is given up, and which epoch may register."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.backends.protocol import MemberHandle
from cluster.control import worker_slot
from cluster.control.record import WorkerRecord, WorkerState
from cluster.control.worker_slot import (
    FAILED_GPU_STARTS,
    FAILED_STARTS,
    EpochSettings,
    Place,
    WorkerSlot,
)
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from cluster.spec.resolve import ResolvedModel, resolve_models
from tandem.config.launch import WorkerLaunch
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2
from worker.exit_codes import GPU_LOST_EXIT_CODE, WRONG_CONFIG_EXIT_CODE


class ScriptedMember:
    """A place whose processes end when the test says so."""

    def __init__(self) -> None:
        self.starts: list[MemberStart] = []
        self.stops = 0
        self.started: MemberStart | None = None
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self._end = asyncio.Event()
        self._end_of_it = MemberEnd(reason="")

    async def start(self, start: MemberStart) -> None:
        self.starts.append(start)
        self.started = start
        self._end = asyncio.Event()

    async def wait_end(self) -> MemberEnd:
        await self._end.wait()
        return self._end_of_it

    async def running(self) -> RunningMember | None:
        end = self._end_of_it if self._end.is_set() else None
        return None if self.started is None else RunningMember(start=self.started, device="cpu", end=end)

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.stops += 1
        self.started = None

    def end(self, reason: str, exit_code: int | None = None) -> None:
        self._end_of_it = MemberEnd(reason=reason, exit_code=exit_code)
        self._end.set()


def at(members: Sequence[MemberHandle]) -> Place:
    async def place() -> Sequence[MemberHandle]:
        return members

    return place


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    source = str(write_tiny_llama(tmp_path / "tiny"))
    spec = ClusterSpec.model_validate({"models": [{"source": source, "decode": {"tp": 2}}]})
    return resolve_models(spec, lambda what: None, fetch=False)[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts without the waits between them."""
    monkeypatch.setattr(worker_slot, "MAX_BACKOFF_S", 0.05)


@asynccontextmanager
async def running(
    model: ResolvedModel, tmp_path: Path, members: list[ScriptedMember], record: WorkerRecord | None = None
) -> AsyncIterator[tuple[WorkerSlot, list[WorkerState]]]:
    """The slot, and every state it reported."""
    reported: list[WorkerState] = []
    settings = EpochSettings(ClusterSpec(models=(model.spec,)), "127.0.0.1:1", None, tmp_path / "run")
    slot = WorkerSlot(
        "decode-0", Role.DECODE, model, at(members), settings, lambda slot: reported.append(slot.state), record
    )
    task = asyncio.create_task(slot.run())
    try:
        yield slot, reported
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_epoch_that_cannot_be_run_is_seen_and_another_follows(model: ResolvedModel, tmp_path: Path) -> None:
    """Else the slot's task would end unseen, and its worker would stay away for good."""

    class Failing(ScriptedMember):
        async def start(self, start: MemberStart) -> None:
            await super().start(start)
            if len(self.starts) == 2:
                raise OSError("No space left on device")

    members: list[ScriptedMember] = [Failing(), ScriptedMember()]
    async with running(model, tmp_path, members) as (slot, _):
        await until(lambda: len(members[1].starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        members[1].end("rank-1 was killed")
        await until(lambda: len(members[0].starts) == 3)
        assert (slot.restarts, slot.reason) == (2, "its epoch could not be run: No space left on device")


async def test_one_that_cannot_be_run_at_the_start_fails_the_start(model: ResolvedModel, tmp_path: Path) -> None:
    class Failing(ScriptedMember):
        async def start(self, start: MemberStart) -> None:
            raise OSError("No space left on device")

    settings = EpochSettings(ClusterSpec(models=(model.spec,)), "127.0.0.1:1", None, tmp_path / "run")
    slot = WorkerSlot("decode-0", Role.DECODE, model, at([Failing(), Failing()]), settings, lambda slot: None)
    with pytest.raises(OSError, match="No space left"):
        await slot.run()


async def test_each_restart_has_a_new_epoch_and_run_folder(model: ResolvedModel, tmp_path: Path) -> None:
    members = [ScriptedMember(), ScriptedMember()]
    async with running(model, tmp_path, members) as (slot, reported):
        await until(lambda: len(members[1].starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        members[1].end("rank-1 was killed")
        await until(lambda: len(members[0].starts) == 2)
        assert members[0].stops == members[1].stops == 1
        assert reported == [WorkerState.READY, WorkerState.RESTARTING]
        assert (slot.restarts, slot.reason) == (1, "rank-1 was killed")
        launches = [WorkerLaunch.model_validate_json(start.files["launch.json"]) for start in members[0].starts]
        assert launches[1].epoch == slot.epoch
        assert launches[0].epoch != launches[1].epoch
        assert launches[0].run_dir != launches[1].run_dir
        names = [[process.name for process in member.starts[1].processes] for member in members]
        assert names == [["agent-0", "rank-0", "service"], ["agent-1", "rank-1"]]


async def left_behind(model: ResolvedModel, tmp_path: Path, members: list[ScriptedMember]) -> WorkerRecord:
    """The record of a ready worker whose controller has died: nothing stopped its members."""
    async with running(model, tmp_path, members) as (slot, _):
        await until(lambda: len(members[1].starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch, address="a:1"))
        record = slot.record()
    for member in members:
        member.started, member.stops = member.starts[0], 0
    return WorkerRecord.model_validate_json(record.model_dump_json())


async def test_the_next_controller_takes_a_running_epoch_over_as_it_is(model: ResolvedModel, tmp_path: Path) -> None:
    members = [ScriptedMember(), ScriptedMember()]
    record = await left_behind(model, tmp_path, members)
    async with running(model, tmp_path, members, record) as (slot, reported):
        assert (slot.state, slot.epoch, slot.restarts) == (WorkerState.READY, record.epoch, 0)
        assert slot.info is not None
        assert slot.info.address == "a:1"
        await asyncio.sleep(0.05)
        assert [len(member.starts) for member in members] == [1, 1]
        assert [member.stops for member in members] == [0, 0]
        assert reported == []
        slot.registered(slot.info)  # as every worker does when a controller is back
        assert reported == []
        members[0].end("rank-0 was killed")
        await until(lambda: len(members[1].starts) == 2)
        assert (slot.restarts, slot.reason) == (1, "rank-0 was killed")


async def test_a_restart_that_is_asked_for_before_the_epoch_is_watched_again_is_made_once(
    model: ResolvedModel, tmp_path: Path
) -> None:
    members = [ScriptedMember(), ScriptedMember()]
    record = await left_behind(model, tmp_path, members)
    async with running(model, tmp_path, members, record) as (slot, _):
        slot.restart("restarted by request")  # its task has not run yet
        await until(lambda: len(members[0].starts) == 2)
        assert (slot.restarts, slot.reason) == (1, "restarted by request")
        await asyncio.sleep(0.05)
        assert [len(member.starts) for member in members] == [2, 2]


async def test_a_restart_that_is_asked_for_between_two_epochs_ends_the_next(
    model: ResolvedModel, tmp_path: Path
) -> None:
    """Otherwise the next epoch would keep the drain that preceded the restart."""
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        member.may_stop.clear()
        member.end("rank-0 was killed")
        await until(lambda: slot.restarts == 1)
        slot.drain = cluster_pb2.DRAIN_MOVE
        slot.restart("restarted by request")
        member.may_stop.set()
        await until(lambda: slot.restarts == 2)
        assert (slot.reason, slot.drain) == ("restarted by request", cluster_pb2.DRAIN_NONE)
        await until(lambda: len(member.starts) == 3)
        await asyncio.sleep(0.05)
        assert slot.restarts == 2


async def test_after_thousands_of_failures_a_worker_is_still_restarted(model: ResolvedModel, tmp_path: Path) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        slot._failures = 5000
        await asyncio.sleep(0)
        member.end("rank-0 was killed")
        await until(lambda: len(member.starts) == 2)


async def test_a_rank_that_ended_while_there_was_no_controller_restarts_the_worker(
    model: ResolvedModel, tmp_path: Path
) -> None:
    members = [ScriptedMember(), ScriptedMember()]
    record = await left_behind(model, tmp_path, members)
    members[1].end("rank-1 was killed")
    async with running(model, tmp_path, members, record) as (slot, reported):
        await until(lambda: len(members[0].starts) == 2)
        assert reported == [WorkerState.RESTARTING]
        assert (slot.restarts, slot.reason) == (1, "rank-1 was killed")
        assert slot.epoch != record.epoch
        assert [member.stops for member in members] == [1, 1]


async def test_a_host_that_was_lost_with_the_controller_starts_a_new_epoch(
    model: ResolvedModel, tmp_path: Path
) -> None:
    members = [ScriptedMember(), ScriptedMember()]
    record = await left_behind(model, tmp_path, members)
    async with running(model, tmp_path, (gone := [ScriptedMember(), ScriptedMember()]), record) as (slot, _):
        await until(lambda: len(gone[1].starts) == 1)
        assert slot.epoch != record.epoch
        assert slot.state is WorkerState.RESTARTING


async def test_an_ended_epoch_cannot_register(model: ResolvedModel, tmp_path: Path) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        first = slot.epoch
        assert slot.accepts(first)
        member.may_stop.clear()  # its processes take their time to end, and one of them might still call
        member.end("rank-0 was killed")
        await until(lambda: slot.state is WorkerState.RESTARTING)
        assert not slot.accepts(first)
        member.may_stop.set()


async def test_a_worker_that_never_became_ready_is_given_up_with_its_reason(
    model: ResolvedModel, tmp_path: Path
) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, reported):
        for number in range(1, FAILED_STARTS + 1):
            await until(lambda number=number: len(member.starts) == number)  # type: ignore[misc]
            await asyncio.sleep(0)
            member.end("rank-0 ended with exit code 2: no room")
            await until(lambda number=number: slot.restarts == number)  # type: ignore[misc]
        await until(lambda: slot.is_given_up)
        assert slot.reason == "rank-0 ended with exit code 2: no room"
        assert reported[-1] is WorkerState.FAILED
        assert not slot.accepts(slot.epoch)
    assert len(member.starts) == FAILED_STARTS


async def test_a_start_that_its_configuration_forbids_is_not_tried_again(model: ResolvedModel, tmp_path: Path) -> None:
    member, other = ScriptedMember(), ScriptedMember()
    async with running(model, tmp_path, [member, other]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        await asyncio.sleep(0)
        member.end("rank-0 was killed")  # as it is by what it waits for
        other.end("rank-1 ended with exit code 78: engine.vllm: no such setting", WRONG_CONFIG_EXIT_CODE)
        await until(lambda: slot.is_given_up)
        assert slot.reason == "rank-1 ended with exit code 78: engine.vllm: no such setting"
    assert len(member.starts) == 1


async def test_a_worker_that_was_ready_once_is_never_given_up(model: ResolvedModel, tmp_path: Path) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        for number in range(1, FAILED_STARTS + 2):
            await until(lambda number=number: len(member.starts) == number)  # type: ignore[misc]
            await asyncio.sleep(0)
            member.end("rank-0 was killed")
            await until(lambda number=number: slot.restarts == number)  # type: ignore[misc]
        assert slot.state is WorkerState.RESTARTING


async def lose_gpu(slot: WorkerSlot, member: ScriptedMember, number: int) -> None:
    """Ends the start with this number, from 1, as a rank does whose GPU failed."""
    await until(lambda: len(member.starts) == number)
    await asyncio.sleep(0)
    member.end("rank-0 ended with exit code 74: error: cuda:1 failed", GPU_LOST_EXIT_CODE)
    await until(lambda: slot.restarts == number)


async def test_a_worker_on_a_dead_gpu_is_given_up_even_if_it_was_ready_once(
    model: ResolvedModel, tmp_path: Path
) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, reported):
        await until(lambda: len(member.starts) == 1)
        slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
        await lose_gpu(slot, member, 1)  # while it serves: it may have been a bad kernel
        for number in range(2, FAILED_GPU_STARTS + 2):
            assert slot.state is WorkerState.RESTARTING
            await lose_gpu(slot, member, number)
        await until(lambda: slot.is_given_up)
        assert slot.reason.startswith("5 starts in a row failed on its GPU, which stays reserved")
        assert slot.reason.endswith("cuda:1 failed")
        assert reported[-1] is WorkerState.FAILED
    assert len(member.starts) == FAILED_GPU_STARTS + 1


async def test_a_gpu_that_works_again_starts_the_count_again(model: ResolvedModel, tmp_path: Path) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        for number in range(1, 2 * FAILED_GPU_STARTS):
            if number % (FAILED_GPU_STARTS - 1) == 1:
                await until(lambda number=number: len(member.starts) == number)  # type: ignore[misc]
                slot.registered(cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=slot.epoch))
            await lose_gpu(slot, member, number)
        assert slot.state is WorkerState.RESTARTING


async def test_a_refused_worker_keeps_the_reason_of_its_refusal(model: ResolvedModel, tmp_path: Path) -> None:
    member = ScriptedMember()
    async with running(model, tmp_path, [member]) as (slot, _):
        await until(lambda: len(member.starts) == 1)
        slot.refuse("dtype: expected float32, got bfloat16")
        member.end("the service ended with exit code 2")
        await until(lambda: member.stops > 0)
        assert slot.reason == "dtype: expected float32, got bfloat16"
        assert slot.state is WorkerState.FAILED
    assert len(member.starts) == 1
