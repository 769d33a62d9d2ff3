"""Prompts for a trace that has lengths and block ids only: equal ids give equal tokens, so what the trace says is
shared is shared on the server too, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError

FIRST_ORDINARY_TOKEN = 256  # below are special tokens and single bytes in most vocabularies
_KEPT_BLOCKS = 4096
_SHARED, _OWN = 0, 1
# Each of them one token, with the space before it, in the usual vocabularies.
_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so what up "
    "about into than them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after also did many must before back see through way where get much go well "
    "your know should down work year because come people just say each those take day good how long little use "
    "very own great still men here life both between old under last never place same another think house while "
    "high right might came off find since give against three himself look few general hand "
)
WORDS = _WORDS.split()


class Prompts:
    """`salt`: other salts give other prompts, so that no cache of an earlier run helps. `vocab_tokens` None: texts of
    about as many tokens, for servers that take no token ids."""

    def __init__(self, trace: TrafficTrace, salt: int, vocab_tokens: int | None) -> None:
        if vocab_tokens is not None and vocab_tokens < 2:
            raise ConfigError(f"--vocab: expected at least 2 tokens, got {vocab_tokens}", field="--vocab")
        self._trace, self._salt = trace, salt
        self._vocab_tokens = vocab_tokens
        self._block: Callable[[int], NDArray[np.int64]] = lru_cache(_KEPT_BLOCKS)(self._draw_block)

    def of(self, index: int) -> list[int] | str:
        """Request `index`'s prompt."""
        length = int(self._trace.prompt_tokens[index])
        prefixes = self._trace.prefixes
        blocks = [] if prefixes is None else [self._block(each) for each in prefixes.of(index).tolist()]
        shared = sum(len(each) for each in blocks)
        own = self._draw(_OWN, index, max(0, length - shared))
        return self._said(np.concatenate([*blocks, own])[:length])

    def other(self, number: int, length: int) -> list[int] | str:
        """A prompt of no request, to warm up with."""
        return self._said(self._draw(_OWN, len(self._trace) + number, length))

    def _said(self, drawn: NDArray[np.int64]) -> list[int] | str:
        return drawn.tolist() if self._vocab_tokens is not None else " ".join(WORDS[each] for each in drawn.tolist())

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        prefixes = self._trace.prefixes
        return self._draw(_SHARED, block, 0 if prefixes is None else prefixes.block_tokens)

    def _draw(self, kind: int, name: int, count: int) -> NDArray[np.int64]:
        high = self._vocab_tokens or len(WORDS)
        low = 0 if self._vocab_tokens is None else min(FIRST_ORDINARY_TOKEN, high // 2)
        return np.random.default_rng([self._salt, kind, name]).integers(low, high, count)
