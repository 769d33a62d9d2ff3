"""Requests inside a simulated engine: the engine's `Sequence` with a token count instead of token values.

Block hashes come from the trace's block ids: equal ids give equal hashes. All other blocks (the end of a prompt, the
answer) belong to one request only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import PrefixBlocks
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash
from tandem.scheduler.sequence import Sequence

_UNSHARED = 1 << 63  # the id's top bit: a block of one request only
_BLOCK_BITS = 24  # of the id: a block's number in its request
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class TokenCount(list[int]):
    """A list of tokens that stores only its length."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def append(self, token: int) -> None:
        self._count += 1

    def grow(self, count: int) -> None:
        self._count += count

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | list[int]:
        raise NotImplementedError("a simulated request has no token values")


class TraceBlockHashes:
    """Hashes of the blocks of a trace's requests, in blocks of `block_tokens`.

    If these are smaller than the trace's blocks, each trace block is split. If they are larger, the last id of each run
    identifies the block, since ids stand for chained hashes.
    """

    def __init__(self, prefixes: PrefixBlocks | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._prefixes = prefixes
        if prefixes is not None and block_tokens % prefixes.block_tokens and prefixes.block_tokens % block_tokens:
            raise ValueError(f"block_tokens: expected a multiple or divisor of {prefixes.block_tokens}")

    def of(self, index: int, prompt_tokens: int) -> list[BlockHash]:
        """Hashes of request `index`'s full prompt blocks."""
        full = prompt_tokens // self.block_tokens
        shared = self._shared(index)[:full]
        unshared = np.arange(len(shared), full, dtype=np.uint64) | np.uint64(_UNSHARED | index << _BLOCK_BITS)
        return _hashes(np.concatenate([shared, unshared]))

    def unshared(self, index: int, first: int, end: int) -> list[BlockHash]:
        """Hashes of blocks [first, end), which are not in its prompt."""
        return _hashes(np.arange(first, end, dtype=np.uint64) | np.uint64(_UNSHARED | index << _BLOCK_BITS))

    def _shared(self, index: int) -> NDArray[np.uint64]:
        if self._prefixes is None:
            return np.empty(0, np.uint64)
        ids = self._prefixes.of(index).astype(np.uint64)
        if self.block_tokens > self._prefixes.block_tokens:
            run = self.block_tokens // self._prefixes.block_tokens
            named: NDArray[np.uint64] = ids[run - 1 :: run]
            return named
        cuts = self._prefixes.block_tokens // self.block_tokens
        return np.repeat(ids * np.uint64(cuts), cuts) + np.tile(np.arange(cuts, dtype=np.uint64), len(ids))


def _hashes(names: NDArray[np.uint64]) -> list[BlockHash]:
    """The first half is a one-to-one mix (SplitMix64); the prefix index reads that half."""
    mixed = (names ^ (names >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    pairs = np.empty((len(names), 2), np.uint64)
    pairs[:, 0], pairs[:, 1] = mixed ^ (mixed >> np.uint64(31)), names
    raw = pairs.tobytes()
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


@dataclass(slots=True, eq=False)
class SimSequence(Sequence):
    """`trace_hashes` gives the hashes of generated blocks on demand."""

    index: int = 0
    trace_hashes: TraceBlockHashes | None = None
    last_token_s: float = 0.0
    counted: TokenCount = field(default_factory=lambda: TokenCount(0))

    def hashes(self, blocks: int) -> list[BlockHash]:
        have = len(self._hashes)
        if blocks > have and self.trace_hashes is not None:
            self._hashes = self._hashes + self.trace_hashes.unshared(self.index, have, blocks)
        return self._hashes if blocks == len(self._hashes) else self._hashes[:blocks]
