"""The control plane on this machine: what the death of a controller costs.

    python -m benchmarks.control --backend ray --times 10

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the target, `ratio`
value over target (null for a target of 0). docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field

import psutil

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, say, spec_of
from cluster.cli.admin_client import Admin, fetch_status
from cluster.cli.commands.running import RunningCluster
from cluster.cli.load.client import LoadRequest
from cluster.cli.load.grpc_client import GrpcClient
from tandem.errors import TandemError

FAILOVER_TARGET_S = 5.0
STREAMS = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
BETWEEN_S = 12.0  # a controller that ran for longer than 10 s is followed by the next without a delay
POLL_S = 0.02


@dataclass(slots=True)
class Traffic:
    """Requests one after another on each of STREAMS streams, until stopped."""

    client: GrpcClient
    ended: int = 0
    failed: list[str] = field(default_factory=list)
    stopped: bool = False

    async def run(self, stream: int) -> None:
        number = 0
        while not self.stopped:
            number += 1
            prompt = [256 + (31 * stream + 7 * number + position) % 4000 for position in range(PROMPT_TOKENS)]
            try:
                await self.client.send(LoadRequest(prompt, OUTPUT_TOKENS), lambda tokens: None)
                self.ended += 1
            except TandemError as error:
                self.failed.append(error.message)


async def failovers(backend: str, times: int) -> tuple[list[float], Traffic]:
    """Seconds from SIGKILL of the controller until another one has taken over every worker, for each time."""
    seconds = []
    async with live(spec_of(1, 1, {"control.backend": backend})) as cluster:
        client = GrpcClient(cluster.grpc_address, None, tls=False, model="", api_key=None, ignore_eos=True)
        traffic = Traffic(client)
        streams = [asyncio.create_task(traffic.run(number)) for number in range(STREAMS)]
        before = await _view(cluster)
        for _ in range(times):
            await asyncio.sleep(BETWEEN_S)
            _controller().kill()
            began_s = time.monotonic()
            await _until_as(before, cluster)
            seconds.append(time.monotonic() - began_s)
            say(f"taken over in {seconds[-1]:.2f} s; {traffic.ended} requests ended, {len(traffic.failed)} failed")
        traffic.stopped = True
        await asyncio.gather(*streams)
        await client.close()
    return seconds, traffic


async def _until_as(before: list[tuple[str, int, str]], cluster: RunningCluster) -> None:
    while True:
        if await _view(cluster) == before:
            return
        await asyncio.sleep(POLL_S)


def _controller() -> psutil.Process:
    return next(child for child in psutil.Process().children() if "cluster.control" in child.cmdline())


async def _view(cluster: RunningCluster) -> list[tuple[str, int, str]]:
    """Id, epoch and state of each worker; empty while no controller answers."""
    try:
        status = await fetch_status(Admin(cluster.admin_address))
    except TandemError:
        return []
    return sorted((each.info.worker_id, each.info.epoch, each.state) for each in status.workers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("ray", "subprocess"), default="ray")
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    seconds, traffic = asyncio.run(failovers(options.backend, options.times))
    say(f"median {statistics.median(seconds):.2f} s; {traffic.ended} requests; {traffic.failed[:3]}")
    worst = max(seconds)
    ratio = round(worst / FAILOVER_TARGET_S, 3)
    print(Figure("control.failover_s", round(worst, 3), "s", FAILOVER_TARGET_S, ratio).line())
    print(Figure("control.failover_failed_requests", len(traffic.failed), "requests", 0.0, None).line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
