"""One agent with many live peers: its memory and its threads, while it hands over to all of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_bulk import TIMEOUT_S, resident_mb
from benchmarks.handoff_figures import Figure, HandoffSizes
from kvtransfer.control import LinkReport, Received, Sent
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.many_agents import start_host
from kvtransfer.testing.worker import FakeModel, FakeWorker

MODEL = FakeModel(layers=8, kv_heads=8, block_tokens=16, head_dim=64, dtype="bfloat16")
TOKENS = 128  # 2 MiB of KV
AT_ONCE = 8
LOOK_S = 0.05


@asynccontextmanager
async def running(count: int) -> AsyncIterator[tuple[FakeWorker, list[FakeWorker]]]:
    """A prefill worker with an agent of its own, whose links to `count` decode workers were ready once."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        sockets = [Path(folder) / f"decode-{number}" / "agent-0.sock" for number in range(count)]
        host = start_host(sockets)
        workers: list[FakeWorker] = []
        try:
            prefill = FakeWorker(
                Path(folder), "prefill-0", MODEL, num_blocks=512, transport="tcp", connects=True, ttl_s=TIMEOUT_S,
                own_processes=True,
            )  # fmt: skip
            workers.append(prefill)
            for number in range(count):
                name = f"decode-{number}"
                workers.append(
                    FakeWorker(Path(folder), name, MODEL, num_blocks=10, transport="tcp", ttl_s=TIMEOUT_S, host=host)
                )
            for worker in workers:
                await worker.attach()
            for decode in workers[1:]:
                decode.set_peers_of(prefill)
            prefill.set_peers_of(*workers[1:])
            for _ in range(count):
                await prefill.ranks[0].expect(LinkReport, state="ready", timeout_s=TIMEOUT_S)
            yield prefill, workers[1:]
        finally:
            for worker in workers:
                worker.stop()
            host.terminate()
            host.wait()


@dataclass(slots=True)
class Watch:
    """The largest memory and number of threads of a process."""

    pid: int
    rss_mb: float = 0.0
    threads: int = 0

    async def run(self) -> None:
        while True:
            self.rss_mb = max(self.rss_mb, resident_mb(self.pid))
            self.threads = max(self.threads, len(os.listdir(f"/proc/{self.pid}/task")))
            await asyncio.sleep(LOOK_S)


async def hand_over(prefill: FakeWorker, decode: FakeWorker, seed: int) -> None:
    """Raises RuntimeError unless every byte arrives."""
    handoff = Handoff.make(prefill, decode, tokens=TOKENS, seed=seed, ttl_s=TIMEOUT_S)
    blocks = handoff.kv.blocks
    first = blocks * (seed % AT_ONCE)  # blocks of its own: as many handoffs as there is room for
    handoff.source_ids = tuple(range(first, first + blocks))
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, blocks)
    await decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
    if not handoff.arrived():
        raise RuntimeError("handoff: expected the bytes of the prompt in the decode worker's pool, got others")


async def agent_200_peers(sizes: HandoffSizes) -> list[Figure]:
    async with running(sizes.peers) as (prefill, decodes):
        watch = Watch(prefill.ranks[0].process.pid)
        watching = asyncio.create_task(watch.run())
        for first in range(0, sizes.peer_handoffs, AT_ONCE):
            seeds = range(first, first + AT_ONCE)
            await asyncio.gather(*(hand_over(prefill, decodes[seed % len(decodes)], seed) for seed in seeds))
        watching.cancel()
    return [
        Figure("handoff.agent_200_peers_rss_mb", round(watch.rss_mb, 1), "MiB"),
        Figure("handoff.agent_200_peers_threads", watch.threads, "threads"),
    ]
