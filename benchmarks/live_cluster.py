"""A cluster of the demo model for one measurement, and a trace played against it."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cluster.cli.commands.running import running_cluster
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.player import LoadLimits, LoadResult, Player
from cluster.cli.load.prompts import Prompts
from cluster.control.controller import Controller
from cluster.spec.loader import load_spec
from planner.simulator.setup import Slo
from planner.traces.trace import Trace
from tandem.config.spec import ClusterSpec

KV_BLOCKS = 768  # of each worker: the demo model's keys and values are large for a few cores' memory
QUEUED = 4096  # nothing is refused: what waits shows in the latencies


def spec_of(prefill: int, decode: int, changes: Mapping[str, Any] | None = None) -> ClusterSpec:
    """Of the demo model, on free ports, under a name of its own."""
    usual = {
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
    return load_spec(None, usual | dict(changes or {}))


@asynccontextmanager
async def live(spec: ClusterSpec) -> AsyncIterator[Controller]:
    async with running_cluster(spec, say) as controller:
        yield controller


async def play(controller: Controller, trace: Trace, slo: Slo, salt: int) -> LoadResult:
    client = GrpcClient(controller.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
    try:
        prompts = Prompts(trace, salt, await client.vocab_tokens())
        player = Player(trace, prompts, client, slo, LoadLimits())
        await player.warm_up(4)
        return await player.play(controller.grpc_address)
    finally:
        await client.close()


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
