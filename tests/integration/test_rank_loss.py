"""One rank lost is the worker lost: its other ranks end at once, and say why, so that the whole can come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.backends.subprocess_backend import LocalMember
from cluster.control.worker_slot import EpochSettings, WorkerSlot
from cluster.keeper.keeper import Keeper
from cluster.spec.resolve import resolve_models
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import WorkerLost
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.testing.processes import has_ended
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter

LONG = SamplingParams(temperature=0.0, max_tokens=900)


@pytest.mark.parametrize(("busy", "lost"), [(True, 1), pytest.param(False, 0, marks=pytest.mark.soak_only)])
async def test_the_other_rank_ends_with_a_typed_error(pair: StartPair, tmp_path: Path, lost: int, busy: bool) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", seed=1)
    async with pair(model_dir, decode_tp=2, engine=EngineSpec(kv_blocks=80)) as live:
        worker = live.workers.live["decode-0"]
        running = None
        if busy:
            running = asyncio.create_task(ManualRouter().generate(live.decode, random_prompt(20, 300), LONG))
            await until(lambda: live.decode.load.running_requests > 0)
        worker.ranks[lost].kill()
        await asyncio.to_thread(worker.ranks[1 - lost].wait, 60)
        if running is not None:
            with pytest.raises(WorkerLost):
                await running
        assert "RuntimeError" not in worker.log.read_text()
        await until(lambda: live.decode.lost)


@pytest.mark.parametrize("dies", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_routers_are_told_whether_a_worker_of_two_ranks_died_or_stops(
    pair: StartPair, tmp_path: Path, dies: bool
) -> None:
    """Also if the controller is quicker to stop what is left than the leader to notice: requests of death count."""
    model_dir = write_tiny_llama(tmp_path / "tiny", seed=1)
    async with pair(model_dir, decode_tp=2, engine=EngineSpec(kv_blocks=80)) as live:
        worker = live.workers.live["decode-0"]
        running = asyncio.create_task(ManualRouter().generate(live.decode, random_prompt(20, 300), LONG))
        await until(lambda: live.decode.load.running_requests > 0)
        if dies:
            worker.ranks[0].send_signal(signal.SIGSTOP)  # a leader that notices late
            worker.ranks[1].kill()
            await asyncio.to_thread(worker.ranks[1].wait, 60)  # the controller notices no sooner
        for process in (worker.service, *worker.ranks):
            process.send_signal(signal.SIGTERM)
        with pytest.raises(WorkerLost):
            await running
        assert live.decode.died is dies
        worker.kill()


STAGES = ("starts", "waits for its peer", "is ready", "is ready and hangs")


@pytest.mark.parametrize(
    "stage", [STAGES[1], *(pytest.param(each, marks=pytest.mark.slow) for each in (STAGES[0], *STAGES[2:]))]
)
@pytest.mark.acceptance(5, here="every stage of a start")
async def test_in_each_stage_the_whole_worker_ends_within_five_seconds(short_folder: Path, stage: str) -> None:
    source = str(write_tiny_llama(short_folder / "tiny", seed=1))
    spec = ClusterSpec.model_validate(
        {"models": [{"source": source, "decode": {"tp": 2}, "engine": {"kv_blocks": 32, "kernels": "torch"}}]}
    )
    (model,) = resolve_models(spec, lambda what: None, fetch=False)
    keeper = Keeper(short_folder / "logs")
    members = [LocalMember(f"rank{rank}", keeper) for rank in range(2)]
    settings = EpochSettings(spec, "127.0.0.1:1", None, short_folder / "run")

    async def place() -> list[LocalMember]:
        return members

    slot = WorkerSlot("w", Role.DECODE, model, place, settings, lambda slot: None)
    task = asyncio.create_task(slot.run())
    try:
        first, second = [await process_of(member, f"rank-{rank}") for rank, member in enumerate(members)]
        if stage == "waits for its peer":
            second.suspend()
            await until(lambda: any((short_folder / "run").glob("**/rendezvous")))
        elif stage != "starts":
            log = short_folder / "logs" / "rank0.rank-0.log"
            await until(lambda: "attached" in log.read_text() or "ready:" in log.read_text())
        if stage == "is ready and hangs":
            first.suspend()  # as one in a collective that never ends: it takes no SIGTERM
        began_s = time.monotonic()
        os.kill(second.pid, signal.SIGKILL)
        await until(lambda: has_ended(first))
        assert time.monotonic() - began_s < 5.0
        await until(lambda: bool(slot.reason))
        assert "rank-1 was killed by SIGKILL" in slot.reason
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def process_of(member: LocalMember, name: str) -> psutil.Process:
    async with asyncio.timeout(90):
        while True:
            running = await member.running()
            for each in running.processes if running is not None else ():
                if each.name == name:
                    return psutil.Process(each.pid)
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.01)
