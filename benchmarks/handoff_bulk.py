"""Handoffs of one large prompt between two real agents with pools but no engine: speed and memory."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from benchmarks.handoff_figures import Figure, HandoffSizes, against_limit
from benchmarks.handoff_limits import BareGloo, RawSocket, memcpy_s
from kvtransfer.control import BeginStep, Received, Sent
from kvtransfer.session.piece import MAX_PIECE_BYTES
from kvtransfer.session.ticket import Ticket
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeKv, FakeModel, FakeWorker
from tandem.config.transfer import TransportKind

RUN_BLOCKS = 16  # contiguous blocks; the runs are in random order, as in a pool after some use
SETTLE_S = 0.05  # for both agents to open the ticket
TIMEOUT_S = 60.0
MIB = 1 << 20


class Bulk:
    """One prompt in the prefill worker's pool, and its target blocks in the decode worker's pool.

    `received`: for each handoff, the times of its start and end on the host's monotonic clock, and the report.
    """

    def __init__(self, prefill: FakeWorker, decode: FakeWorker, tokens: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self._kv = FakeKv(decode.model, tokens)
        self._source_ids = _block_ids(prefill.num_blocks, self._kv.blocks, seed=1)
        self._target_ids = _block_ids(decode.num_blocks, self._kv.blocks, seed=2)
        self.size_bytes = self._kv.size_bytes
        self.received: list[tuple[float, float, Received]] = []

    def fill(self) -> None:
        self.prefill.ranks[0].write(self._kv, self._source_ids)
        self.decode.ranks[0].pool.blocks[...] = 0

    def has_arrived(self) -> bool:
        return self.decode.ranks[0].holds(self._kv, self._target_ids)

    async def check(self) -> None:
        """Raises RuntimeError unless a handoff delivers every byte."""
        self.fill()
        await self.seconds()
        if not self.has_arrived():
            raise RuntimeError("handoff: expected the bytes of the prompt in the decode worker's pool, got others")

    async def seconds(self) -> float:
        """Time of a handoff of a cached prompt, from the engine's announcement until every block is verified."""
        handoff = self._handoff()
        source, target = self.prefill.ranks[0], self.decode.ranks[0]
        handoff.open_receive()
        handoff.open_send()
        await asyncio.sleep(SETTLE_S)
        step = BeginStep((handoff.range(0, self._kv.blocks, in_cache=True),))
        started_s = time.perf_counter()
        source.send_as_rank(step)
        received = await target.expect(Received, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
        ended_s = time.perf_counter()  # on Linux, perf_counter and monotonic are one clock
        await source.expect(Sent, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
        self.received.append((started_s, ended_s, received))
        return ended_s - started_s

    def breakdown(self) -> dict[str, float]:
        """Medians over the handoffs: pieces, and milliseconds to the first piece's copy, from there to the end of the
        last, from there to the last word of the sender, and from there to the leader. Empty if none says so."""
        rows = []
        for started_s, ended_s, each in self.received:
            stages = each.stages
            if stages is not None and stages.first_piece_at_s and stages.last_piece_at_s and stages.verified_at_s:
                marks = (started_s, stages.first_piece_at_s, stages.last_piece_at_s, stages.verified_at_s, ended_s)
                rows.append((each.pieces, *(1000 * (end - start) for start, end in itertools.pairwise(marks))))
        if not rows:
            return {}
        names = ("pieces", "before_ms", "moving_ms", "closing_ms", "report_ms")
        return {
            name: round(statistics.median(row), 3) for name, row in zip(names, zip(*rows, strict=True), strict=True)
        }

    async def memcpy_s(self) -> float:
        """Time to copy the same number of bytes in this process, from pool to pool in one piece."""
        source, target = (worker.ranks[0].pool.blocks.reshape(-1) for worker in (self.prefill, self.decode))
        return memcpy_s(target[: self.size_bytes], source[: self.size_bytes])

    def _handoff(self) -> Handoff:
        prefill, decode = self.prefill, self.decode
        ticket_id = secrets.token_hex(16)
        ticket = Ticket(
            ticket_id=ticket_id,
            request_id=ticket_id,
            decode_worker=decode.worker_id,
            decode_epoch=decode.epoch,
            prefill_worker=prefill.worker_id,
            prefill_epoch=prefill.epoch,
            first_block=0,
            block_count=self._kv.blocks,
            prompt_tokens=self._kv.tokens,
            ttl_s=TIMEOUT_S,
        )
        return Handoff(prefill, decode, self._kv, self._source_ids, self._target_ids, ticket)


@asynccontextmanager
async def bulk(sizes: HandoffSizes, transport: str, *, digests: bool = True) -> AsyncIterator[Bulk]:
    """A pair with pools in host memory, that has handed over once."""
    async with pair_of(sizes, transport, sizes.bulk_tokens, digests=digests) as (prefill, decode):
        ready = Bulk(prefill, decode, sizes.bulk_tokens)
        await ready.check()
        yield ready


@asynccontextmanager
async def pair_of(
    sizes: HandoffSizes, transport: str, tokens: int, *, digests: bool, devices: tuple[str, str] = ("", "")
) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """A prefill and a decode worker for prompts of up to `tokens`. `devices`: of each, as in FakeWorker."""
    model = FakeModel(sizes.layers, sizes.kv_heads, sizes.block_tokens, sizes.head_dim, sizes.dtype)
    num_blocks = 2 * RUN_BLOCKS + tokens // sizes.block_tokens
    workers: list[FakeWorker] = []
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        try:
            for name, device in zip(("prefill-0", "decode-0"), devices, strict=True):
                worker = FakeWorker(
                    Path(folder),
                    name,
                    model,
                    num_blocks=num_blocks,
                    transport=transport,
                    digests=digests,
                    connects=name == "prefill-0",
                    ttl_s=TIMEOUT_S,
                    device=device,
                    own_processes=True,
                )
                workers.append(worker)
            prefill, decode = workers
            await prefill.attach()
            await decode.attach()
            prefill.set_peers_of(decode)
            decode.set_peers_of(prefill)
            await prefill.linked(timeout_s=TIMEOUT_S)
            yield prefill, decode
        finally:
            for worker in workers:
                worker.stop()


async def mapped(sizes: HandoffSizes) -> list[Figure]:
    async with bulk(sizes, "mapped", digests=False) as pair:
        return [await against_limit("handoff.mapped", pair.size_bytes, sizes.bulk_runs, pair.seconds, pair.memcpy_s)]


async def mapped_digest(sizes: HandoffSizes) -> list[Figure]:
    name = "handoff.mapped_digest"
    async with bulk(sizes, "mapped") as pair:
        return [await against_limit(name, pair.size_bytes, sizes.bulk_runs, pair.seconds, pair.memcpy_s)]


async def gloo(sizes: HandoffSizes) -> list[Figure]:
    async with bulk(sizes, "process_group") as pair:
        with await asyncio.to_thread(BareGloo, MAX_PIECE_BYTES, pair.size_bytes) as limit:

            async def bare_s() -> float:
                return await asyncio.to_thread(limit.seconds)

            return [await against_limit("handoff.gloo", pair.size_bytes, sizes.bulk_runs, pair.seconds, bare_s)]


async def tcp(sizes: HandoffSizes) -> list[Figure]:
    """No figure if the transport does not exist."""
    if not _has_tcp():
        return []
    async with bulk(sizes, "tcp") as pair:
        with await asyncio.to_thread(RawSocket, MAX_PIECE_BYTES, pair.size_bytes) as limit:

            async def raw_s() -> float:
                return await asyncio.to_thread(limit.seconds)

            return [await against_limit("handoff.tcp", pair.size_bytes, sizes.bulk_runs, pair.seconds, raw_s)]


async def agent_rss(sizes: HandoffSizes) -> list[Figure]:
    """The largest memory of all agents with torch-free transports, after a few handoffs."""
    found: list[float] = []
    for transport in ("mapped", "tcp") if _has_tcp() else ("mapped",):
        async with bulk(sizes, transport) as pair:
            for _ in range(2):
                await pair.seconds()
            found += [resident_mb(worker.ranks[0].process.pid) for worker in (pair.prefill, pair.decode)]
    return [Figure("handoff.agent_rss_mb", round(max(found), 1), "MiB")]


def _has_tcp() -> bool:
    return "tcp" in {kind.value for kind in TransportKind}


def resident_mb(pid: int) -> float:
    """Resident memory of a process, including shared libraries, excluding pools (memfd mappings)."""
    total_kb, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counted = not any(word.startswith("/memfd:") for word in rest)
        elif first == "Rss:" and counted:
            total_kb += int(rest[0])
    return total_kb * 1024 / MIB


def _block_ids(num_blocks: int, count: int, seed: int) -> tuple[int, ...]:
    """`count` block ids: runs of `RUN_BLOCKS` contiguous blocks in random order."""
    runs = np.arange(num_blocks - num_blocks % RUN_BLOCKS).reshape(-1, RUN_BLOCKS)
    np.random.default_rng(seed).shuffle(runs)
    return tuple(runs.reshape(-1)[:count].tolist())
