"""The grammars of an engine's requests. What may follow is found in threads while the model computes a step.

A grammar's state is a function of the answer's tokens, which the engine holds: it is brought up to date when it is
asked. So a preempted request, or one that another worker began, needs nothing special.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass

from tandem.errors import InputError, RequestFailed, UnsupportedField
from tandem.grammar.compiler import MAX_FORCED_TOKENS, Allowed, GrammarCompiler, Matcher

MASK_WAIT_S = 0.005  # of a step, for all its masks
THEN_S = 0.001  # for the masks after proposed tokens
MAX_LATE_S = 5.0  # of a request, from when its next token could have been chosen
KEPT_GRAMMARS = 64
NICENESS = 10  # of its threads: a tenth of a core beside a busy thread of the model


@dataclass(frozen=True, slots=True)
class Following:
    """What may follow an answer: the only tokens that may, in order, or those of which one is chosen. `is_complete`:
    nothing. `then`: what may follow after the first, the first two, … of `proposed`, as long as one of several may."""

    forced: tuple[int, ...] = ()
    allowed: Allowed | None = None
    is_complete: bool = False
    proposed: tuple[int, ...] = ()
    then: tuple[Allowed, ...] = ()

    def after(self, token: int) -> Following | None:
        """What may follow after this token, which was allowed; None: it is not known."""
        if not self.then or token != self.proposed[0]:
            return None
        return Following(allowed=self.then[0], proposed=self.proposed[1:], then=self.then[1:])


class SharedGrammar:
    """A grammar as the answers of one tenant share it.

    All copies of a compiled grammar share what the library has learnt of its lexer, which has a limit: then each copy
    fails, whatever its own answer is, and a freshly compiled one goes on.

    Args: `compile` begins to compile it.
    """

    def __init__(self, compile: Callable[[], Future[Matcher]]) -> None:
        self._compile = compile
        self.compiled = compile()

    def renew(self, failed: Future[Matcher]) -> None:
        """Compiles it again, once for all copies of `failed`."""
        if self.compiled is failed:
            self.compiled = self._compile()


class GrammarRun:
    """The grammar of one request.

    Args:
        shared: what it starts from.
        answer_from: position of the answer's first token.
        ends: tokens that end the answer. Other end tokens of the model are allowed only where nothing else is.
        takes_forced: forced tokens are found as many as there are, not one by one.
    """

    def __init__(
        self,
        shared: SharedGrammar,
        threads: ThreadPoolExecutor,
        *,
        answer_from: int,
        ends: frozenset[int],
        takes_forced: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._compiled = shared.compiled
        self._threads = threads
        self._answer_from = answer_from
        self._taken = answer_from  # tokens of prompt and answer that the matcher knows of
        self._ends = ends
        self._takes_forced = takes_forced
        self._clock = clock
        self._matcher: Matcher | None = None
        self._found: Future[Following] | None = None
        self._found_at = -1  # number of tokens that it follows
        self._renewed_at = -1  # number of tokens for which the grammar was compiled again
        self._late_since_s: float | None = None
        self._is_slow = False  # what followed the last token was late

    def prepare(self, tokens: Sequence[int], proposed: tuple[int, ...] = ()) -> None:
        """Begins to find what may follow `tokens` of prompt and answer, and `proposed` ones after them, once the
        grammar is compiled."""
        if self._found_at != len(tokens) and self._compiled.done():
            self._found_at = len(tokens)
            self._found = self._threads.submit(self._find, tuple(tokens[self._taken :]), proposed)

    @property
    def is_compiled(self) -> bool:
        return self._compiled.done()

    @property
    def has_begun(self) -> bool:
        """Whether it knows the tokens that it was told of; not after its grammar was compiled again."""
        return self._matcher is not None

    def has_found(self, tokens: Sequence[int]) -> bool:
        """Whether `take` would not wait."""
        return self._found_at == len(tokens) and self._found is not None and self._found.done()

    def is_awaited(self, tokens: Sequence[int]) -> bool:
        """Whether what may follow `tokens` was late and is still not found: to compute a step for them is in vain."""
        if self._late_since_s is None or self._clock() - self._late_since_s > MAX_LATE_S:
            return False
        self.prepare(tokens)
        return not self.has_found(tokens)

    def take(self, tokens: Sequence[int], wait_s: float) -> Following | None:
        """What may follow `tokens`; None: it is not known within `wait_s`, or at once if it was late for the token
        before. Raises InputError, RequestFailed."""
        is_first = self._late_since_s is None
        end_s = self._clock() + (0.0 if self._is_slow and is_first else wait_s)
        try:
            found = self._wait(tokens, end_s)
        except FutureTimeout:
            self._is_slow = True
            self._check_late()
            return None
        if is_first:
            self._is_slow = False
        self._late_since_s = None
        return found

    def _wait(self, tokens: Sequence[int], end_s: float) -> Following:
        """Raises FutureTimeout at `end_s`."""
        try:
            if self._found_at != len(tokens):
                self._compiled.result(timeout=max(0.0, end_s - self._clock()))
                self.prepare(tokens)
            assert self._found is not None
            return self._found.result(timeout=max(0.0, end_s - self._clock()))
        except InputError:
            if self._compiled.exception() is not None or self._renewed_at == len(tokens):
                raise
        self._renew(len(tokens))
        return self._wait(tokens, end_s)

    def _renew(self, tokens: int) -> None:
        """Begins again with a freshly compiled grammar, to find what follows this number of tokens."""
        self._renewed_at = tokens
        self._shared.renew(self._compiled)
        self._compiled = self._shared.compiled
        self._matcher, self._taken, self._found_at = None, self._answer_from, -1

    def after(self, found: Following, token: int) -> Following:
        """What must follow `token`, which was chosen of what `take` found. It knows no mask."""
        if found.forced and self._takes_forced:
            return Following(found.forced[1:], is_complete=found.is_complete)
        assert self._matcher is not None
        chosen = self._taken + 1
        try:
            self._consume(self._matcher, (token,))
            forced = self._forced(self._matcher) if self._takes_forced else ()
            return Following(forced, is_complete=self._matcher.is_complete)
        except InputError:
            self._renew(chosen)
            return Following()  # the next `take` finds it

    def _find(self, new: tuple[int, ...], proposed: tuple[int, ...]) -> Following:
        """In a thread; never two at once."""
        if self._matcher is None:
            self._matcher = self._compiled.result().copy()
        matcher = self._matcher
        self._consume(matcher, new)
        if forced := self._forced(matcher):
            return Following(forced, is_complete=matcher.is_complete)
        allowed = matcher.allowed(self._ends)
        return Following(allowed=allowed, proposed=proposed, then=self._then(matcher, allowed, proposed))

    def _then(self, matcher: Matcher, allowed: Allowed, proposed: tuple[int, ...]) -> tuple[Allowed, ...]:
        """As far as it is found soon: the first mask waits for them."""
        trial, found = matcher.copy() if proposed else matcher, list[Allowed]()
        end_s = self._clock() + THEN_S
        with suppress(InputError):  # it costs too much: the token before it is chosen all the same
            for token in proposed:
                if not allowed[token] or self._clock() > end_s:
                    break
                trial.consume((token,))
                if trial.is_complete or trial.forced() is not None:
                    break
                allowed = trial.allowed(self._ends)
                found.append(allowed)
        return tuple(found)

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
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile", initializer=_yield_to_model)
        masking = min(4, os.cpu_count() or 1)
        self._masking = ThreadPoolExecutor(masking, thread_name_prefix="grammar-mask", initializer=_yield_to_model)
        self._kept: OrderedDict[tuple[bytes, str], SharedGrammar] = OrderedDict()

    def start(
        self, grammar: str, tenant: bytes, *, answer_from: int, ends: frozenset[int], takes_forced: bool
    ) -> GrammarRun:
        """As `GrammarRun`. `tenant`: grammars are shared within it only, as timing would tell that another sent one."""
        key = (tenant, grammar)
        shared = self._kept.get(key)
        if shared is None:
            shared = self._kept[key] = SharedGrammar(lambda: self._compiling.submit(self._compile, grammar))
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return GrammarRun(shared, self._masking, answer_from=answer_from, ends=ends, takes_forced=takes_forced)

    def _compile(self, grammar: str) -> Matcher:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(grammar)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)


def _yield_to_model() -> None:
    """Lets the threads that compute a step go first on their cores: one request's grammar delays no other's tokens."""
    with suppress(OSError):  # not the default of this kernel's policy
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def no_grammars() -> InputError:
    return UnsupportedField("grammar: this worker's model has no tokenizer that grammars could use", field="grammar")
