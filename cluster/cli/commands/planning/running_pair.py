"""What only a running pair of workers shows: how long steps take in a rank's process, and what all other processes
compute, which are clients, routers, services and transfer agents.

It serves short answers and longer ones, one at a time and several together, and long prompts. Differences between them
are what a request, a frame, a token, a handoff and a byte of KV cost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import psutil

from cluster.cli.commands.running import RunningCluster, running_cluster
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.player import LoadLimits, LoadResult, Player
from cluster.cli.load.prompts import Prompts
from cluster.spec.loader import load_spec
from planner.shared_host import HostCores
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from tandem.config.engine import EngineSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError, UnavailableError

REQUESTS, AT_ONCE = 32, 8
SHORT_PROMPT, LONG_PROMPT = 32, 288
SHORT_ANSWER, LONG_ANSWER = 2, 26
_LOADS = ((SHORT_PROMPT, SHORT_ANSWER), (SHORT_PROMPT, LONG_ANSWER), (LONG_PROMPT, SHORT_ANSWER))
IDLE_S = 3.0
BLOCKS = 2 * AT_ONCE * -(-(LONG_PROMPT + LONG_ANSWER) // 16)
_KINDS: Final = {"cluster.backends.rank_process": "ranks", "kvtransfer.agent": "agents"}  # by module; else "others"


@dataclass(frozen=True, slots=True)
class RunningPair:
    """`decode_s`: between two tokens of a request that decodes alone after `context` tokens. `prefill_s`: how much
    later the first token of a prompt of LONG_PROMPT tokens comes than that of one of SHORT_PROMPT."""

    host: HostCores
    decode_s: float
    context: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class _Served:
    """`cpu_s`: CPU seconds by kind of process, of all requests together. `ttft_s`, `decode_s`: medians of requests."""

    tokens: int
    kv_bytes: float
    cpu_s: Mapping[str, float]
    ttft_s: float
    decode_s: float


def measure_pair(host: HostCores, source: str, engine: EngineSpec, report: Callable[[str], None]) -> RunningPair | None:
    """None if it cannot be measured here, which is reported. A pair of vLLM's workers takes minutes to start."""
    if engine.kind != "tandem":
        report("a running pair of workers not measured: that needs Tandem's engine")
        return None
    if sys.platform != "linux":
        report("a running pair of workers not measured: this system does not tell the CPU time of processes")
        return None
    try:
        found = asyncio.run(_measure(host, _spec(source, engine)))
    except TandemError as error:
        report(f"a running pair of workers not measured: {error.message}")
        return None
    costs = found.host
    report(
        f"processes beside the engines: {1000 * costs.request_s:.1f} ms a request, {1e6 * costs.frame_s:.0f} µs the "
        f"frame of a step, {1e6 * costs.token_s:.0f} µs a token, {1000 * costs.handoff_s:.1f} ms a handoff, "
        f"{1e9 * costs.kv_byte_s:.1f} ns a byte of KV; {costs.idle_cores:.1%} of a core without requests"
    )
    return found


def _spec(source: str, engine: EngineSpec) -> ClusterSpec:
    own = engine.model_copy(update={"kv_blocks": BLOCKS * 16 // engine.block_tokens + 1, "kv_memory_bytes": None})
    changes = {
        "name": f"profile-{os.getpid()}-{secrets.token_hex(3)}",
        "models.0.source": source,
        "models.0.engine": own.model_dump(exclude_unset=True),
        "models.0.prefill.workers": 1,
        "models.0.decode.workers": 1,
        "router.http_port": 0,
        "router.grpc_port": 0,
        "router.disaggregation": "always",
        "control.admin_port": 0,
        "control.backend": "subprocess",
    }
    return load_spec(None, changes)


async def _measure(host: HostCores, spec: ClusterSpec) -> RunningPair:
    async with running_cluster(spec, lambda _: None) as cluster:
        await _served(cluster, {}, SHORT_PROMPT, SHORT_ANSWER)  # warms up
        before = _cpu_s()
        await asyncio.sleep(IDLE_S)
        idle = {kind: (spent_s - before[kind]) / IDLE_S for kind, spent_s in _cpu_s().items()}
        short, answers, prompts = [await _served(cluster, idle, *load) for load in _LOADS]
        one_short, one_answer, one_prompt = [await _served(cluster, idle, *load, at_once=1) for load in _LOADS]
    decode_s = (one_answer.decode_s - one_short.decode_s) / (LONG_ANSWER - SHORT_ANSWER)
    # A token that is alone has a frame, and among others its part of one. The rank's step loop computes all the time.
    together_s, alone_s = (_of_a_token("others", *pair) for pair in ((short, answers), (one_short, one_answer)))
    frame_s = max(0.0, alone_s - together_s) / (1 - 1 / AT_ONCE)
    io_s = max(0.0, _of_a_token("ranks", one_short, one_answer) - decode_s)
    kv_byte_s = max(0.0, prompts.cpu_s["agents"] - short.cpu_s["agents"]) / max(1.0, prompts.kv_bytes - short.kv_bytes)
    costs = replace(
        host,
        request_s=max(0.0, short.cpu_s["others"] - together_s * short.tokens) / REQUESTS,
        frame_s=frame_s + io_s,
        token_s=max(0.0, together_s - frame_s / AT_ONCE),
        handoff_s=max(0.0, short.cpu_s["agents"] - kv_byte_s * short.kv_bytes) / REQUESTS,
        kv_byte_s=kv_byte_s,
        idle_cores=min(host.cores / 2, sum(idle.values())),
    )
    context = SHORT_PROMPT + (SHORT_ANSWER + LONG_ANSWER) // 2
    # Not CPU time: by that of the ranks, prompts seemed to take 14 and 25 % longer than clusters showed.
    return RunningPair(costs, decode_s, context, one_prompt.ttft_s - one_short.ttft_s)


def _of_a_token(kind: str, short: _Served, long: _Served) -> float:
    return max(0.0, (long.cpu_s[kind] - short.cpu_s[kind]) / (long.tokens - short.tokens))


async def _served(
    cluster: RunningCluster, idle: Mapping[str, float], prompt: int, answer: int, *, at_once: int = AT_ONCE
) -> _Served:
    """`idle`: CPU seconds per second, by kind of process, that are not spent for the requests."""
    trace = TrafficTrace("profile", np.zeros(at_once), np.full(at_once, prompt), np.full(at_once, answer))
    client = GrpcClient(cluster.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
    times, moved = [], 0.0
    try:
        vocabulary = await client.vocab_tokens()
        before, began_s = _cpu_s(), time.monotonic()
        for _ in range(REQUESTS // at_once):
            prompts = Prompts(trace, secrets.randbits(30), vocabulary)
            player = Player(trace, prompts, client, Slo(), LoadLimits())
            moved += _moved_bytes(await player.play(cluster.grpc_address))
            times.append(player.times)
        after, took_s = _cpu_s(), time.monotonic() - began_s
    finally:
        await client.close()
    cpu_s = {kind: spent_s - before[kind] - idle.get(kind, 0.0) * took_s for kind, spent_s in after.items()}
    ttft_s, decode_s = (
        float(np.median(np.concatenate([getattr(each, name) for each in times]))) for name in ("ttft_s", "decode_s")
    )
    return _Served(REQUESTS * answer, moved, cpu_s, ttft_s, decode_s)


def _moved_bytes(result: LoadResult) -> float:
    """Raises UnavailableError if not every request was answered."""
    if result.finished < result.requests:
        raise UnavailableError(f"{result.requests - result.finished} of {result.requests} requests got no answer")
    return result.kv_bytes_moved or 0.0


def _cpu_s() -> dict[str, float]:
    """CPU time so far of this process and its descendants."""
    found = {"ranks": 0.0, "agents": 0.0, "others": 0.0}
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        with suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            kind = next((kind for module, kind in _KINDS.items() if module in command), "others")
            found[kind] += time.clock_gettime(cpu_clock(process.pid))
    return found


def cpu_clock(pid: int) -> int:
    """Linux' clock of a process' CPU time, ended threads included (clock_getcpuclockid(3)): precise to nanoseconds."""
    return ~pid << 3 | 2
