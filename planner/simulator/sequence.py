"""Requests inside a simulated engine: the engine's own `Sequence` with counted tokens and blocks known by number.

A prompt of 100,000 tokens is a number here. Block hashes come from the trace's block ids: equal ids, equal hashes;
everything else (the end of a prompt, answers) is its request's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import PrefixBlocks
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash
from tandem.scheduler.sequence import Sequence

_OWN = 1 << 63
_BLOCKS = 24  # bits for a block's number in its request
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class TokenCount(list[int]):
    """A list of tokens nobody looks at: it knows how many they are."""

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


class BlockNames:
    """Hashes of the blocks of a trace's requests, at the granularity `block_tokens`.

    Where that is finer than the trace's own, a trace block is cut; where it is coarser, the last id of each run names
    it, since ids are those of chained hashes.
    """

    def __init__(self, prefixes: PrefixBlocks | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._prefixes = prefixes
        if prefixes is not None and block_tokens % prefixes.block_tokens and prefixes.block_tokens % block_tokens:
            raise ValueError(f"block_tokens: expected a multiple or divisor of {prefixes.block_tokens}")

    def of(self, index: int, prompt_tokens: int) -> list[BlockHash]:
        """Of request `index`'s full prompt blocks."""
        full = prompt_tokens // self.block_tokens
        shared = self._shared(index)[:full]
        own = np.arange(len(shared), full, dtype=np.uint64) | np.uint64(_OWN | index << _BLOCKS)
        return _hashes(np.concatenate([shared, own]))

    def own(self, index: int, first: int, end: int) -> list[BlockHash]:
        """Of blocks [first, end), which are not of its prompt."""
        return _hashes(np.arange(first, end, dtype=np.uint64) | np.uint64(_OWN | index << _BLOCKS))

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
    """One to one in the first half (SplitMix64), which is what the prefix index looks at."""
    mixed = (names ^ (names >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    pairs = np.empty((len(names), 2), np.uint64)
    pairs[:, 0], pairs[:, 1] = mixed ^ (mixed >> np.uint64(31)), names
    raw = pairs.tobytes()
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


@dataclass(slots=True, eq=False)
class SimSequence(Sequence):
    """`names` has the hashes of its prompt's full blocks; those of what it generates follow as they are asked for."""

    index: int = 0
    attempt: int = 0
    maker: BlockNames | None = None
    last_token_s: float = 0.0
    counted: TokenCount = field(default_factory=lambda: TokenCount(0))

    def hashes(self, blocks: int) -> list[BlockHash]:
        have = len(self._hashes)
        if blocks > have and self.maker is not None:
            self._hashes = self._hashes + self.maker.own(self.index, have, blocks)
        return self._hashes if blocks == len(self._hashes) else self._hashes[:blocks]
