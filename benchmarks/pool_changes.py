"""Live changes of the pools: role changes, moves, and the autoscaler compared with static splits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, play, say, spec_of
from benchmarks.prediction import load_measured_hardware, setup_for
from cluster.cli.admin_client import Admin, fetch_status
from cluster.cli.commands.running import RunningCluster
from cluster.cli.load.client import LoadRequest
from cluster.cli.load.grpc_client import GrpcClient
from planner.hardware import Hardware
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.rpc.directory import WIRE_ROLE
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

ROLE_CHANGE_TARGET_S, MOVED_GAP_TARGET_MS, WORST_TARGET, BEST_TARGET = 1.0, 500.0, 1.5, 0.95
STATIC = ((0, 3), (1, 2), (2, 1))
OVERLOADED = 4.0
_IDLE_PER_S, _MAX_PER_S, _NEAR = 0.01, 1000.0, 1.02


@dataclass(frozen=True, slots=True)
class PoolChangeSizes:
    role_changes: int = 6
    moved: int = 16
    moved_prompt: int = 32
    moved_output: int = 160
    phase_s: float = 30.0
    draws: int = 300  # requests drawn, from which a phase takes its part
    load: float = 0.7  # share of the capacity of a phase's best static split


def role_change(sizes: PoolChangeSizes) -> Iterator[Figure]:
    """The slowest of several role changes of an idle worker, back and forth: from the command until it is ready."""
    seconds = asyncio.run(_role_changes(sizes.role_changes))
    worst, target = max(seconds), ROLE_CHANGE_TARGET_S
    yield Figure("pools.role_change_s", round(worst, 3), "s", target, round(worst / target, 3))


async def _role_changes(times: int) -> list[float]:
    found = []
    async with live(spec_of(1, 2)) as cluster:
        for number in range(times):
            prefill, decode = (2, 1) if number % 2 == 0 else (1, 2)
            began_s = time.monotonic()
            async with _admin(cluster) as stub:
                await stub.Scale(cluster_pb2.ScaleRequest(prefill=prefill, decode=decode))
            await _until_served(cluster, prefill, decode)
            found.append(time.monotonic() - began_s)
    say(f"role changes: {', '.join(f'{each:.3f}' for each in found)} s")
    return found


@asynccontextmanager
async def _admin(cluster: RunningCluster) -> AsyncIterator[cluster_pb2_grpc.ClusterAsyncStub]:
    async with Admin(cluster.admin_address).channel() as channel:
        yield cluster_pb2_grpc.ClusterStub(channel)


async def _until_served(cluster: RunningCluster, prefill: int, decode: int) -> None:
    """Waits until every worker is ready in its new role."""
    wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
    while True:
        status = await fetch_status(Admin(cluster.admin_address, None))
        ready = [worker.info.role for worker in status.workers if worker.state == "ready"]
        if all(ready.count(WIRE_ROLE[role]) == count for role, count in wanted.items()):
            return
        await asyncio.sleep(0.02)


def moved_gap(sizes: PoolChangeSizes) -> Iterator[Figure]:
    """The longest pause between two tokens of one answer after one of two decoding workers is drained. `reference` is
    the target."""
    usual_ms, gap_ms = asyncio.run(_moved(sizes))
    say(f"median pause before the drain (one step): {usual_ms:.0f} ms")
    ratio = round(gap_ms / MOVED_GAP_TARGET_MS, 3)
    yield Figure("pools.moved_gap_ms", round(gap_ms, 1), "ms", MOVED_GAP_TARGET_MS, ratio)


async def _moved(sizes: PoolChangeSizes) -> tuple[float, float]:
    """Returns the median pause before the drain and the longest one after it, in ms."""
    async with live(spec_of(0, 2)) as cluster:
        client = GrpcClient(cluster.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
        token_times: list[list[float]] = [[] for _ in range(sizes.moved)]
        ask = [
            LoadRequest([256 + 31 * number + position for position in range(sizes.moved_prompt)], sizes.moved_output)
            for number in range(sizes.moved)
        ]

        all_decode = asyncio.Event()

        def note(times_s: list[float], tokens: int) -> None:
            times_s.append(time.monotonic())
            if all(len(each) >= 8 for each in token_times):
                all_decode.set()

        answers = [
            asyncio.create_task(client.send(each, partial(note, times_s)))
            for each, times_s in zip(ask, token_times, strict=True)
        ]
        await all_decode.wait()
        drained_s = time.monotonic()
        async with _admin(cluster) as stub:
            await stub.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="decode-0"))
        await asyncio.gather(*answers)
        await client.close()
    gaps = [(later, later - earlier) for each in token_times for earlier, later in pairwise(each)]
    before = statistics.median(gap for at_s, gap in gaps if at_s <= drained_s)
    return 1000 * before, 1000 * max(gap for at_s, gap in gaps if at_s > drained_s)


def capacity(trace: TrafficTrace, setup: Setup) -> float:
    """The highest requests/s at which the simulated p95 TTFT is at most OVERLOADED times the one without load."""

    def ttft_s(rate: float) -> float:
        found = simulate(trace.at_rate(rate / trace.requests_per_s), setup).ttft_s.p95
        return float("inf") if found is None else found

    low, high = _IDLE_PER_S, _MAX_PER_S
    most_s = OVERLOADED * ttft_s(low)
    while high / low > _NEAR:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ttft_s(middle) <= most_s else (low, middle)
    return low


def shifting(hardware: Hardware, sizes: PoolChangeSizes) -> TrafficTrace:
    """Long prompts, then long answers, then both; each phase at `load` times its best static split's capacity."""
    kinds = ((LengthSpec(320, 0.3, 600), LengthSpec(4)), (LengthSpec(24), LengthSpec(96, 0.3, 160)),
             (LengthSpec(200, 0.3, 400), LengthSpec(48, 0.3, 96)))  # fmt: skip
    phases = []
    for seed, (prompts, answers) in enumerate(kinds):
        drawn = synthetic_trace(sizes.draws, Gamma(1.0), prompts, answers, seed=seed)
        best = max(capacity(drawn, setup_for(hardware, *split, drawn)) for split in STATIC)
        rate = sizes.load * best
        phases.append(drawn.at_rate(rate / drawn.requests_per_s).between(0.0, sizes.phase_s))
    starts_s = np.cumsum([0.0, *(sizes.phase_s for _ in phases[1:])])
    return replace(
        phases[0],
        name="shifting",
        arrival_s=np.concatenate([each.arrival_s + start_s for each, start_s in zip(phases, starts_s, strict=True)]),
        prompt_tokens=np.concatenate([each.prompt_tokens for each in phases]),
        output_tokens=np.concatenate([each.output_tokens for each in phases]),
        notes=(),
    )


def ratios(cost: Path, sizes: PoolChangeSizes) -> Iterator[Figure]:
    """Goodput with the autoscaler over the goodput of the worst and the best static split of three workers."""
    hardware = load_measured_hardware(cost)
    trace = shifting(hardware, sizes)
    step_s = hardware.cost(1).decode_step_s(4, 4 * 256)
    slo = Slo(4.0 * hardware.cost(1).prefill_s(512, 0), 3.0 * step_s)
    say(f"{len(trace)} requests; objectives: TTFT {slo.ttft_s:.2f} s, TPOT {slo.tpot_s:.3f} s")
    static = {split: asyncio.run(_goodput(spec_of(*split), trace, slo)) for split in STATIC}
    scaled = asyncio.run(_goodput(autoscaled_spec(slo), trace, slo))
    worst, best = min(static.values()), max(static.values())
    for name, other, target in (("worst", worst, WORST_TARGET), ("best", best, BEST_TARGET)):
        ratio = scaled / other if other else 0.0
        yield Figure(f"pools.live_{name}_static_ratio", round(ratio, 3), "ratio", target, round(ratio / target, 3))


def autoscaled_spec(slo: Slo) -> ClusterSpec:
    """A spec of three workers whose roles the autoscaler changes."""
    classes: list[dict[str, Any]] = [{"name": "interactive", "ttft_slo_s": slo.ttft_s, "tpot_slo_s": slo.tpot_s}]
    scaler = {"enabled": True, "interval_s": 1.0, "confirmations": 2, "role_cooldown_s": 4.0}
    return spec_of(1, 2, {"router.classes": classes, "autoscaler": scaler})


async def _goodput(spec: ClusterSpec, trace: TrafficTrace, slo: Slo) -> float:
    async with live(spec) as cluster:
        began_s = time.time()
        result = await play(cluster, trace, slo, salt=2)
        status = await fetch_status(Admin(cluster.admin_address, None))
        for each in reversed(status.autoscaler.decisions):
            say(f"{each.at_unix_s - began_s:.0f} s: {each.reason} ({each.outcome})")
    model = spec.models[0]
    name = f"{model.prefill.workers}:{model.decode.workers}"
    say(f"{name}: goodput {result.goodput_per_s:.3f}/s, both objectives {result.attainment.joint:.1%}")
    return result.goodput_per_s or 0.0
