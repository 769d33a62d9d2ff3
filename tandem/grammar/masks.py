"""The grammars of an engine's requests. What may follow is found in threads while the model computes a step.

A grammar's state is a function of the answer's tokens, which the engine holds: it is brought up to date when it is
asked. So a preempted request, or one that another worker began, needs nothing special.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from tandem.errors import InputError, RequestFailed
from tandem.grammar.compiler import MAX_FORCED_TOKENS, Allowed, GrammarCompiler, Matcher

MASK_WAIT_S = 0.005  # of a step, for all its masks
MAX_LATE_S = 5.0  # of a request, from when its next token could have been chosen
KEPT_GRAMMARS = 64


@dataclass(frozen=True, slots=True)
class Following:
    """What may follow an answer: the only tokens that may, in order, or those of which one is chosen. `is_complete`:
    nothing."""

    forced: tuple[int, ...] = ()
    allowed: Allowed | None = None
    is_complete: bool = False


class GrammarRun:
    """The grammar of one request.

    Args:
        compiled: what it starts from.
        answer_from: position of the answer's first token.
        ends: tokens that end the answer. Other end tokens of the model are allowed only where nothing else is.
        takes_forced: forced tokens are found as many as there are, not one by one.
    """

    def __init__(
        self,
        compiled: Future[Matcher],
        threads: ThreadPoolExecutor,
        *,
        answer_from: int,
        ends: frozenset[int],
        takes_forced: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiled = compiled
        self._threads = threads
        self._taken = answer_from  # tokens of prompt and answer that the matcher knows of
        self._ends = ends
        self._takes_forced = takes_forced
        self._clock = clock
        self._matcher: Matcher | None = None
        self._found: Future[Following] | None = None
        self._found_at = -1  # number of tokens that it follows
        self._late_since_s: float | None = None

    def prepare(self, tokens: Sequence[int]) -> None:
        """Begins to find what may follow `tokens` of prompt and answer, once the grammar is compiled."""
        if self._found_at != len(tokens) and self._compiled.done():
            self._found_at = len(tokens)
            self._found = self._threads.submit(self._find, tuple(tokens[self._taken :]))

    def has_found(self, tokens: Sequence[int]) -> bool:
        """Whether `take` would not wait."""
        return self._found_at == len(tokens) and self._found is not None and self._found.done()

    def take(self, tokens: Sequence[int], wait_s: float) -> Following | None:
        """What may follow `tokens`; None: it is not known within `wait_s`. Raises InputError, RequestFailed."""
        end_s = self._clock() + wait_s
        try:
            if self._found_at != len(tokens):
                self._compiled.result(timeout=max(0.0, wait_s))
                self.prepare(tokens)
            assert self._found is not None
            found = self._found.result(timeout=max(0.0, end_s - self._clock()))
        except FutureTimeout:
            self._check_late()
            return None
        self._late_since_s = None
        return found

    def after(self, found: Following, token: int) -> Following:
        """What must follow `token`, which was chosen of what `take` found. It knows no mask."""
        if found.forced and self._takes_forced:
            return Following(found.forced[1:], is_complete=found.is_complete)
        assert self._matcher is not None
        self._consume(self._matcher, (token,))
        forced = self._forced(self._matcher) if self._takes_forced else ()
        return Following(forced, is_complete=self._matcher.is_complete)

    def _find(self, new: tuple[int, ...]) -> Following:
        """In a thread; never two at once."""
        if self._matcher is None:
            self._matcher = self._compiled.result().copy()
        matcher = self._matcher
        self._consume(matcher, new)
        if forced := self._forced(matcher):
            return Following(forced, is_complete=matcher.is_complete)
        return Following(allowed=matcher.allowed(self._ends))

    def _consume(self, matcher: Matcher, tokens: tuple[int, ...]) -> None:
        matcher.consume(tokens)
        self._taken += len(tokens)

    def _forced(self, matcher: Matcher) -> tuple[int, ...]:
        """Each is found after the one before it, so that a worker that begins in the middle finds the same."""
        forced: list[int] = []
        while len(forced) < MAX_FORCED_TOKENS and (token := matcher.forced()) is not None:
            forced.append(token)
            if not self._takes_forced:
                break
            self._consume(matcher, (token,))
        return tuple(forced)

    def _check_late(self) -> None:
        now_s = self._clock()
        if self._late_since_s is None:
            self._late_since_s = now_s
        elif now_s - self._late_since_s > MAX_LATE_S:
            raise RequestFailed(f"grammar: what may follow was not found in {MAX_LATE_S:g} s; use a simpler grammar")


class Grammars:
    """Compiles grammars in a thread of their own, one at a time, and keeps the last ones of each tenant.

    Args: `load` gives the compiler, once, at the first grammar.
    """

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        self._masking = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="grammar-mask")
        self._kept: OrderedDict[tuple[bytes, str], Future[Matcher]] = OrderedDict()

    def start(
        self, grammar: str, tenant: bytes, *, answer_from: int, ends: frozenset[int], takes_forced: bool
    ) -> GrammarRun:
        """As `GrammarRun`. `tenant`: grammars are shared within it only, as timing would tell that another sent one."""
        key = (tenant, grammar)
        compiled = self._kept.get(key)
        if compiled is None:
            compiled = self._kept[key] = self._compiling.submit(self._compile, grammar)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return GrammarRun(compiled, self._masking, answer_from=answer_from, ends=ends, takes_forced=takes_forced)

    def _compile(self, grammar: str) -> Matcher:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(grammar)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)


def no_grammars() -> InputError:
    return InputError("grammar: this worker's model has no tokenizer that grammars could use", field="grammar")
