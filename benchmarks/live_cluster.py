"""Starts a cluster of the demo model for one measurement, and plays a trace against it."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cluster.cli.commands.running import RunningCluster, running_cluster
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.player import LoadLimits, LoadResult, Player
from cluster.cli.load.prompts import Prompts
from cluster.spec.loader import load_spec
from planner.simulator.setup import Slo
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.config.spec import ClusterSpec

KV_BLOCKS = 768  # per worker: the demo model's KV is large for the memory of a few cores
QUEUED = 4096  # no request is refused: waiting shows in the latencies


def spec_of(prefill: int, decode: int, changes: Mapping[str, Any] | None = None) -> ClusterSpec:
    """A spec of the demo model on free ports, with a unique name."""
    defaults = {
        "name": f"bench-{os.getpid()}",
        "models.0.prefill.workers": prefill,
        "models.0.decode.workers": decode,
        "models.0.engine.kv_blocks": KV_BLOCKS,
        "router.http_port": 0,
        "router.grpc_port": 0,
        "router.max_queued_requests": QUEUED,
        "router.queue_timeout_s": 600.0,
        "router.classes": [{"name": "interactive"}],
        "control.admin_port": 0,
        "control.backend": "subprocess",
    }
    return load_spec(None, defaults | dict(changes or {}))


@asynccontextmanager
async def live(spec: ClusterSpec) -> AsyncIterator[RunningCluster]:
    async with running_cluster(spec, say) as cluster:
        yield cluster


async def play(cluster: RunningCluster, trace: TrafficTrace, slo: Slo, salt: int) -> LoadResult:
    async with _player(cluster, trace, slo, salt) as player:
        return await player.play(cluster.grpc_address)


async def play_timed(cluster: RunningCluster, trace: TrafficTrace, salt: int) -> tuple[LoadResult, MeasuredTimes]:
    """Also what each request took."""
    async with _player(cluster, trace, Slo(), salt) as player:
        return await player.play(cluster.grpc_address), player.times


@asynccontextmanager
async def _player(cluster: RunningCluster, trace: TrafficTrace, slo: Slo, salt: int) -> AsyncIterator[Player]:
    client = GrpcClient(cluster.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
    try:
        player = Player(trace, Prompts(trace, salt, await client.vocab_tokens()), client, slo, LoadLimits())
        await player.warm_up(4)
        yield player
    finally:
        await client.close()


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
