"""The prefix index: memory, event rate and look-up time, compared with a peer's index."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import psutil

from benchmarks.handoff_figures import Figure
from benchmarks.router_peer import PeerTree, peer_tree
from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash
from tandem.kvcache.prefix_events import PrefixEvent, PrefixSnapshot, decode_event, encode_event, entry_id, split_hashes

BYTES_PER_BLOCK = 20  # the value that the documentation recommends
TURN = 64  # look-ups before the other side's turn, so a slow phase of the machine affects both
READ_EVENTS = 512  # per read of a stream

LookupQuery = TypeVar("LookupQuery")
Prompt = tuple[BlockHash, ...]
StreamEntry = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Each block is held by one worker only, which needs the most memory."""

    blocks: int = 10_000_000
    workers: int = 64
    prompt_blocks: int = 256
    prompts: int = 2048  # each looked up once, so none is in the processor's caches
    events: int = 400_000  # with one block each
    peer_blocks: int = 1_000_000


QUICK = IndexSizes(blocks=20_000, workers=4, prompt_blocks=32, prompts=16, events=2_000, peer_blocks=2_000)


def figures(sizes: IndexSizes) -> Iterator[Figure]:
    dice = np.random.default_rng(1)
    gc.collect()
    before_bytes = psutil.Process().memory_info().rss
    mirror = PrefixMirror(BYTES_PER_BLOCK * sizes.blocks)
    chains = _fill(mirror, dice, sizes.blocks, sizes)
    gc.collect()
    used_bytes = psutil.Process().memory_info().rss - before_bytes - sum(map(len, chains))
    if mirror.lost_blocks:
        raise RuntimeError(f"index: expected room for every block, lost {mirror.lost_blocks}")
    yield Figure("index.bytes_per_block", round(used_bytes / len(mirror), 1), "B")
    prompts = _prompts(chains, sizes)
    if any(max(mirror.match(_fresh(prompt)).values(), default=0) != sizes.prompt_blocks for prompt in prompts[:100]):
        raise RuntimeError("index: expected every prompt to match in full")
    yield Figure("index.lookup_256_us", round(_median_us(mirror.match, prompts), 1), "us")
    yield _events(mirror, dice, sizes)
    peer = peer_tree()
    if peer is not None:
        yield from _beside(peer, dice, sizes)


def _fill(mirror: PrefixMirror, dice: np.random.Generator, blocks: int, sizes: IndexSizes) -> list[bytes]:
    """Gives every worker its share of blocks. Returns the chains from which the prompts are cut."""
    kept = []
    for number in range(sizes.workers):
        hashes = dice.bytes(HASH_BYTES * (blocks // sizes.workers))
        mirror.load(f"w{number}", PrefixSnapshot(1, 0, hashes))
        kept.append(hashes[: HASH_BYTES * sizes.prompt_blocks * (sizes.prompts // sizes.workers)])
    return kept


def _prompts(chains: Sequence[bytes], sizes: IndexSizes) -> list[bytes]:
    step = HASH_BYTES * sizes.prompt_blocks
    return [each[at : at + step] for each in chains for at in range(0, len(each), step)]


def _fresh(prompt: bytes) -> Prompt:
    """New hash objects, as in a real request."""
    return tuple(split_hashes(prompt))


def _median_us(lookup: Callable[[Prompt], object], prompts: Sequence[bytes]) -> float:
    return 1e6 * statistics.median(_timed_s(lookup, _fresh(prompt)) for prompt in prompts)


def _timed_s(lookup: Callable[[LookupQuery], object], query: LookupQuery) -> float:
    started_s = time.perf_counter()
    lookup(query)
    return time.perf_counter() - started_s


def _events(mirror: PrefixMirror, dice: np.random.Generator, sizes: IndexSizes) -> Figure:
    """Events of a worker with a full cache, alternating stored and removed. Includes decoding the entries."""
    reads: list[tuple[WorkerKey, list[StreamEntry]]] = []
    for number in range(sizes.workers):
        blocks = split_hashes(dice.bytes(HASH_BYTES * (sizes.events // sizes.workers // 2)))
        events = [(stored, block) for block in blocks for stored in (True, False)]
        # A removed block was stored some thousand events earlier.
        shift = min(1000, len(blocks) // 2)
        events = [(stored, blocks[at // 2 if stored else (at // 2 - shift)]) for at, (stored, _) in enumerate(events)]
        entries = [
            (entry_id(1, seq), encode_event(PrefixEvent(1, seq, *each))) for seq, each in enumerate(events, start=1)
        ]
        key = WorkerKey(f"w{number}", 1)
        reads += [(key, entries[at : at + READ_EVENTS]) for at in range(0, len(entries), READ_EVENTS)]
    started_s = time.perf_counter()
    for worker, part in reads:
        if mirror.apply(worker, [decode_event(*entry) for entry in part]) is not Applied.OK:
            raise RuntimeError("index: expected every event to be applied")
    took_s = time.perf_counter() - started_s
    return Figure("index.events_per_s", round(sum(len(part) for _, part in reads) / took_s), "events/s")


def _beside(peer: PeerTree, dice: np.random.Generator, sizes: IndexSizes) -> Iterator[Figure]:
    """Single look-ups of the same prompts, alternating between two indexes of the same size."""
    mirror = PrefixMirror(max(BYTES_PER_BLOCK * sizes.peer_blocks, 1 << 20))
    chains = _fill(mirror, dice, sizes.peer_blocks, sizes)
    prompts = _prompts(chains, sizes)
    for number, prompt in enumerate(prompts):
        peer.store(number % sizes.workers, _fresh(prompt))
    filler = sizes.peer_blocks - len(prompts) * sizes.prompt_blocks
    for at in range(0, filler, sizes.prompt_blocks):
        peer.store(at % sizes.workers, split_hashes(dice.bytes(HASH_BYTES * sizes.prompt_blocks)))
    our_s: list[float] = []
    their_s: list[float] = []
    for at in range(0, len(prompts), TURN):
        their_s += [_timed_s(peer.match, peer.query(_fresh(each))) for each in prompts[at : at + TURN]]
        our_s += [_timed_s(mirror.match, _fresh(each)) for each in prompts[at : at + TURN]]
    ours, theirs = statistics.median(our_s), statistics.median(their_s)
    yield Figure("index.peer", round(1 / ours), "look-ups/s", round(1 / theirs), round(theirs / ours, 2))
    events = peer.single_events(split_hashes(dice.bytes(HASH_BYTES * min(sizes.events, 50_000))))
    took_s = _timed_s(peer.apply, events)
    yield Figure("index.peer_events_per_s", round(len(events) / took_s), "events/s")
