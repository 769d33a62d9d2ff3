"""What processes beside the engines compute on this host: clients, routers, services and transfer agents.

A pair of workers serves short answers, longer ones and long prompts; the differences between their processes' CPU time
are what a request, a token, a handoff and a byte of KV cost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

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

AT_ONCE, TIMES = 8, 4
SHORT_PROMPT, LONG_PROMPT = 32, 288
SHORT_ANSWER, LONG_ANSWER = 2, 26
BLOCKS = 2 * AT_ONCE * -(-(LONG_PROMPT + LONG_ANSWER) // 16)
_RANK, _AGENT = "cluster.backends.rank_process", "kvtransfer.agent"


@dataclass(frozen=True, slots=True)
class _Spent:
    """CPU seconds of all requests of a load. `others`: neither ranks nor agents."""

    requests: int
    tokens: int
    kv_bytes: float
    agents_s: float
    others_s: float


def with_process_costs(host: HostCores, source: str, engine: EngineSpec, report: Callable[[str], None]) -> HostCores:
    """`host` as it is if they cannot be measured here, which is reported. They do not depend on the engine, and a pair
    of vLLM's workers takes minutes to start."""
    if engine.kind != "tandem":
        report("processes beside the engines not measured: that needs Tandem's engine")
        return host
    if sys.platform != "linux":
        report("processes beside the engines not measured: this system does not tell their CPU time")
        return host
    try:
        found = asyncio.run(_measure(host, _spec(source, engine)))
    except TandemError as error:
        report(f"processes beside the engines not measured: {error.message}")
        return host
    report(
        f"processes beside the engines: {1000 * found.request_s:.1f} ms a request, {1e6 * found.token_s:.0f} µs a "
        f"token, {1000 * found.handoff_s:.1f} ms a handoff, {1e9 * found.kv_byte_s:.1f} ns a byte of KV"
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


async def _measure(host: HostCores, spec: ClusterSpec) -> HostCores:
    async with running_cluster(spec, lambda _: None) as cluster:
        await _spent(cluster, SHORT_PROMPT, SHORT_ANSWER)  # warms up
        short = await _spent(cluster, SHORT_PROMPT, SHORT_ANSWER)
        answers = await _spent(cluster, SHORT_PROMPT, LONG_ANSWER)
        prompts = await _spent(cluster, LONG_PROMPT, SHORT_ANSWER)
    token_s = max(0.0, (answers.others_s - short.others_s) / (answers.tokens - short.tokens))
    kv_byte_s = max(0.0, (prompts.agents_s - short.agents_s) / max(1.0, prompts.kv_bytes - short.kv_bytes))
    request_s = max(0.0, short.others_s - token_s * short.tokens) / short.requests
    handoff_s = max(0.0, short.agents_s - kv_byte_s * short.kv_bytes) / short.requests
    return replace(host, request_s=request_s, token_s=token_s, handoff_s=handoff_s, kv_byte_s=kv_byte_s)


async def _spent(cluster: RunningCluster, prompt: int, answer: int) -> _Spent:
    count = AT_ONCE * TIMES
    trace = TrafficTrace("profile", np.zeros(AT_ONCE), np.full(AT_ONCE, prompt), np.full(AT_ONCE, answer))
    client = GrpcClient(cluster.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
    try:
        vocabulary = await client.vocab_tokens()
        before, moved = _cpu_s(), 0.0
        for _ in range(TIMES):
            prompts = Prompts(trace, secrets.randbits(30), vocabulary)
            result = await Player(trace, prompts, client, Slo(), LoadLimits()).play(cluster.grpc_address)
            moved += _moved_bytes(result)
        after = _cpu_s()
    finally:
        await client.close()
    agents_s, others_s = (after[kind] - before[kind] for kind in ("agents", "others"))
    return _Spent(count, count * answer, moved, agents_s, others_s)


def _moved_bytes(result: LoadResult) -> float:
    """Raises UnavailableError if not every request was answered."""
    if result.finished < result.requests:
        raise UnavailableError(f"{result.requests - result.finished} of {result.requests} requests got no answer")
    return result.kv_bytes_moved or 0.0


def _cpu_s() -> dict[str, float]:
    """CPU time so far of this process and its descendants, ranks left out."""
    found = {"agents": 0.0, "others": 0.0}
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        with suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            if _RANK not in command:
                found["agents" if _AGENT in command else "others"] += time.clock_gettime(cpu_clock(process.pid))
    return found


def cpu_clock(pid: int) -> int:
    """Linux' clock of a process' CPU time, ended threads included (clock_getcpuclockid(3)): precise to nanoseconds."""
    return ~pid << 3 | 2
