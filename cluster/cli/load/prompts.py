"""Prompts for a trace, which has only lengths and block ids. Equal ids give equal tokens, so requests share exactly the
prefixes that the trace says they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError

FIRST_ORDINARY_TOKEN = 256  # in most vocabularies, lower ids are special tokens and single bytes
_KEPT_BLOCKS = 4096
_SHARED, _OWN = 0, 1
# In the usual vocabularies, each word with its leading space is one token.
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
    """`salt`: a new salt gives new prompts, so that caches of an earlier run have no effect. `vocab_tokens` None: makes
    texts of about as many tokens, for servers that accept no token ids."""

    def __init__(self, trace: TrafficTrace, salt: int, vocab_tokens: int | None) -> None:
        if vocab_tokens is not None and vocab_tokens < 2:
            raise ConfigError(f"--vocab: expected at least 2 tokens, got {vocab_tokens}", field="--vocab")
        self._trace, self._salt = trace, salt
        self._vocab_tokens = vocab_tokens
        self._block: Callable[[int], NDArray[np.int64]] = lru_cache(_KEPT_BLOCKS)(self._draw_block)

    def of(self, index: int) -> list[int] | str:
        """The prompt of request `index`."""
        length = int(self._trace.prompt_tokens[index])
        prefixes = self._trace.prefixes
        blocks = [] if prefixes is None else [self._block(each) for each in prefixes.of(index).tolist()]
        shared = sum(len(each) for each in blocks)
        own = self._draw(_OWN, index, max(0, length - shared))
        return self._encode(np.concatenate([*blocks, own])[:length])

    def warm_up(self, number: int, length: int) -> list[int] | str:
        """A prompt that no request has, for warming up."""
        return self._encode(self._draw(_OWN, len(self._trace) + number, length))

    def _encode(self, drawn: NDArray[np.int64]) -> list[int] | str:
        return drawn.tolist() if self._vocab_tokens is not None else " ".join(WORDS[each] for each in drawn.tolist())

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        prefixes = self._trace.prefixes
        return self._draw(_SHARED, block, 0 if prefixes is None else prefixes.block_tokens)

    def _draw(self, kind: int, name: int, count: int) -> NDArray[np.int64]:
        high = self._vocab_tokens or len(WORDS)
        low = 0 if self._vocab_tokens is None else min(FIRST_ORDINARY_TOKEN, high // 2)
        return np.random.default_rng([self._salt, kind, name]).integers(low, high, count)
