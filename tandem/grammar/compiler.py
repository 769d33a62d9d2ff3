"""Compiles grammars for one tokenizer. Torch-free; only this package imports `llguidance`.

What a grammar allows next depends on the tokens of the answer alone, so another worker that takes them finds the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointError, InputError
from tandem.grammar.constraint import MAX_GRAMMAR_BYTES, Constraint
from tandem.grammar.schema_keywords import first_line

Allowed = NDArray[np.bool_]  # [vocab_size]

MAX_FORCED_TOKENS = 64  # taken at once
# Work is limited in units of the library, so that a grammar is refused alike on any machine. Of one mask: about 5 ms.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=60_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Matcher:
    """The state of one answer in its grammar. Not thread-safe."""

    def __init__(self, inner: llguidance.LLMatcher, vocab_size: int, eos: frozenset[int]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos = eos

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._eos)

    def consume(self, tokens: Sequence[int]) -> None:
        """Raises InputError if the grammar does not allow them, or if they cost too much."""
        if tokens and not self._inner.consume_tokens(list(tokens)):
            self._raise()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole: nothing may follow but its end."""
        return self._inner.is_stopped()

    def forced(self) -> int | None:
        """The only token that may follow, in the tokenizer's own way to write the text that must follow."""
        tokens = self._inner.compute_ff_tokens()
        return tokens[0] if tokens else None

    def allowed(self, ends: frozenset[int]) -> Allowed:
        """The tokens that may follow; end tokens of the model that are not in `ends` only if nothing else may.
        Releases the interpreter lock. Raises InputError if they cost too much, or if there are none."""
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        if self._inner.is_error():
            self._raise()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if without := [each for each in self._eos - ends if allowed[each]]:
            others = allowed.copy()
            others[without] = False
            return others if others.any() else allowed
        return allowed

    def _raise(self) -> None:
        raise InputError(
            f"grammar: {first_line(self._inner.get_error())} ({self._inner.stop_reason()}); use a simpler one",
            field="grammar",
        )


class GrammarCompiler:
    """Args: `tokenizer_json` is the content of a checkpoint's `tokenizer.json`. `eos`: tokens that end an answer."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos)
        if not eos:
            raise CheckpointError(
                "config.json: eos_token_id: constrained answers need a token that ends them; the model names none",
                field="model",
            )
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos))
        except Exception as error:
            raise CheckpointError(f"tokenizer.json: constrained answers need it: {error}", field="model") from error

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos: Sequence[int]) -> GrammarCompiler:
        """Takes about half a second. Raises CheckpointError."""
        try:
            return cls((model_dir / "tokenizer.json").read_text("utf-8"), vocab_size, eos)
        except OSError as error:
            raise CheckpointError(f"{model_dir}: expected a tokenizer.json: {error}", field="model") from error

    def check(self, constraint: Constraint) -> Matcher:
        """As `compile`. Raises InputError with the field of the part at fault, in which the client can find it."""
        try:
            return self.compile(constraint.grammar)
        except InputError as error:
            for part in constraint.parts:
                self.check(part)
            raise constraint.located(error.message) from None

    def compile(self, grammar: str) -> Matcher:
        """Releases the interpreter lock. Raises InputError with the library's reason."""
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:  # routers' values are checked too
            raise InputError(f"grammar: expected at most {MAX_GRAMMAR_BYTES} bytes", field="grammar")
        inner = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if inner.is_error():
            raise InputError(f"grammar: {first_line(inner.get_error())}", field="grammar")
        matcher = Matcher(inner, self._vocab_size, self._eos)
        matcher.copy().allowed(self._eos)  # nothing may satisfy it, or the vocabulary cannot write what would
        return matcher
