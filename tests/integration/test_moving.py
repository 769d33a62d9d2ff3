"""Requests that decode move between workers, and workers change their role: a real router, real workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.testing.live import LiveWorkers
from router.requests.raw_request import RawRequest, RawSampling
from router.service import RouterService
from router.testing.stub_worker import until as within
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.request import SamplingParams
from tandem.rpc.directory import WIRE_ROLE
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2
from tests.conftest import Reference

until = partial(within, timeout_s=60.0)

VOCAB = 300
STREAMS = 16
ENGINE = EngineSpec(kv_blocks=400, max_step_tokens=100)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 120}
DONE = 'tandem_moves_total{model="tiny",result="done"}'
ROUNDS = 3 if os.environ.get("TANDEM_SOAK") else 1


@dataclass
class Stream:
    prompt: list[int]
    sampling: dict[str, Any]
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0

    async def read(self, service: RouterService) -> None:
        submitted = await service.submit(RawRequest("tiny", tuple(self.prompt), RawSampling(**self.sampling)))
        heard_s = None
        async for pieces in submitted.stream:
            now_s = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now_s - (heard_s or now_s))
            heard_s = now_s
            self.tokens += [token.token_id for piece in pieces for token in piece.tokens]
        assert submitted.stream.final is not None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, heads=4, kv_heads=2, seed=1)


def streams(reference: Reference, first_seed: int = 0) -> list[Stream]:
    found: list[Stream] = []
    seed = first_seed
    while len(found) < STREAMS:
        seed += 1
        sampling = SEEDED if seed % 2 else GREEDY
        prompt = random_prompt(20 + 7 * len(found), VOCAB, seed)
        try:
            found.append(Stream(prompt, sampling, reference.answer(prompt, SamplingParams(**sampling))))
        except ValueError:
            continue  # a near tie
    return found


async def told(running: LiveWorkers, worker_id: str, *, role: Role | None = None, move: bool = False) -> None:
    """As a controller tells everybody of another role, or that a worker is to be emptied."""
    info = cluster_pb2.WorkerInfo()
    info.CopyFrom(running.directory.workers[worker_id])
    if role is not None:
        info.role = WIRE_ROLE[role]
    info.drain = cluster_pb2.DRAIN_MOVE if move else cluster_pb2.DRAIN_NONE
    await running.directory.put(info)


@pytest.mark.slow
async def test_requests_move_between_decode_workers_and_their_clients_do_not_notice(
    routed: Callable[..., Any], tiny: Path, reference_for: Callable[[Path], Reference]
) -> None:
    asked = streams(reference_for(tiny))
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE) as live:
        fleet = live.app.dispatcher.fleet
        workers = {worker.key.worker_id: worker for worker in fleet.workers()}
        reading = [asyncio.create_task(stream.read(live.app.service)) for stream in asked]
        await until(lambda: all(len(stream.tokens) >= 2 for stream in asked))
        for turn in range(ROUNDS):
            leaving, other = f"decode-{turn % 2}", f"decode-{1 - turn % 2}"
            await told(live.workers, leaving, move=True)
            await until(lambda leaving=leaving: not workers[leaving].account.requests)  # type: ignore[misc]
            assert workers[other].account.requests or all(each.done() for each in reading)
            await told(live.workers, leaving)
        await asyncio.gather(*reading)
        for stream in asked:
            assert stream.tokens == stream.expected
        metrics = live.app.metrics.render().decode()
        moved = sum(int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(DONE))
        assert moved  # how many depends on how fast the machine is
        print(f"longest gap {max(stream.longest_gap_s for stream in asked) * 1e3:.0f} ms, {moved} moved")


async def test_workers_change_their_roles_in_place_and_keep_what_they_cached(
    routed: Callable[..., Any], tiny: Path, reference_for: Callable[[Path], Reference]
) -> None:
    asked = streams(reference_for(tiny), first_seed=100)
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE) as live:
        fleet = live.app.dispatcher.fleet
        reading = [asyncio.create_task(stream.read(live.app.service)) for stream in asked[:8]]
        await until(lambda: all(len(stream.tokens) >= 2 for stream in asked[:8]))
        began_s = time.monotonic()
        await told(live.workers, "decode-1", role=Role.PREFILL)  # with requests of its own, that go on there
        await until(lambda: fleet.count_ready(Role.PREFILL) == 2 and fleet.count_ready(Role.DECODE) == 1)
        changed_s = time.monotonic() - began_s
        await told(live.workers, "prefill-0", role=Role.DECODE)
        await until(lambda: fleet.count_ready(Role.PREFILL) == 1 and fleet.count_ready(Role.DECODE) == 2)
        reading += [asyncio.create_task(stream.read(live.app.service)) for stream in asked[8:]]
        await asyncio.gather(*reading)
        for stream in asked:
            assert stream.tokens == stream.expected
        worker = next(each for each in fleet.workers() if each.key.worker_id == "decode-1")
        assert worker.role is Role.PREFILL
        print(f"a role changed in {changed_s * 1e3:.0f} ms")
