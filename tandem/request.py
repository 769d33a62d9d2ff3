"""A request's states and sampling parameters. Torch-free; docs/request-lifecycle.md draws the states.

`RequestState` is the lifecycle of a request in the router; its end states are metric labels. Build `SamplingParams`
with `SamplingParams.parse` at the edge; every instance is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.errors import InputError, InternalError, shown

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0


class RequestState(StrEnum):
    RECEIVED = "received"
    ADMITTED = "admitted"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    MIGRATING = "migrating"
    FINISHED = "finished"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        return self in END_STATES


END_STATES = frozenset({RequestState.FINISHED, RequestState.REJECTED, RequestState.CANCELLED, RequestState.FAILED})

_S = RequestState
# Edges of the lifecycle. Any state that is not an end may also become CANCELLED or FAILED.
EDGES: dict[RequestState, frozenset[RequestState]] = {
    _S.RECEIVED: frozenset({_S.ADMITTED, _S.REJECTED}),
    _S.ADMITTED: frozenset({_S.QUEUED, _S.REJECTED}),
    _S.QUEUED: frozenset({_S.PREFILLING, _S.REJECTED}),
    _S.PREFILLING: frozenset({_S.HANDOFF, _S.DECODING, _S.FINISHED, _S.MIGRATING}),
    _S.HANDOFF: frozenset({_S.DECODING, _S.FINISHED, _S.MIGRATING}),
    _S.DECODING: frozenset({_S.FINISHED, _S.MIGRATING}),
    _S.MIGRATING: frozenset({_S.QUEUED}),
}


class Lifecycle:
    """The state of one request. Each change is a named transition that refuses a wrong edge."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = RequestState.RECEIVED

    @property
    def state(self) -> RequestState:
        return self._state

    def _to(self, target: RequestState) -> None:
        if target not in EDGES.get(self._state, frozenset()):
            raise InternalError(f"request cannot change from {self._state} to {target}")
        self._state = target

    def admit(self) -> None:
        self._to(_S.ADMITTED)

    def enqueue(self) -> None:
        self._to(_S.QUEUED)

    def start_prefill(self) -> None:
        self._to(_S.PREFILLING)

    def start_handoff(self) -> None:
        self._to(_S.HANDOFF)

    def start_decode(self) -> None:
        self._to(_S.DECODING)

    def migrate(self) -> None:
        self._to(_S.MIGRATING)

    def finish(self) -> None:
        self._to(_S.FINISHED)

    def reject(self) -> None:
        self._to(_S.REJECTED)

    def cancel(self) -> None:
        self._end(_S.CANCELLED)

    def fail(self) -> None:
        self._end(_S.FAILED)

    def _end(self, target: RequestState) -> None:
        if self._state.is_end:
            raise InternalError(f"request ended as {self._state} and cannot become {target}")
        self._state = target


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample tokens. `temperature` 0 is greedy; None means "no limit" for `top_k` and "none" for `logprobs`.

    `logit_bias` holds (token id, addend to its logit). `prompt_logprobs` is `logprobs` for the prompt's tokens.
    `min_tokens`: stop tokens cannot be chosen before the answer has so many.
    `grammar`: what the answer has to satisfy (tandem/grammar/compiler.py).
    `embeds`: the prompt's embedding is wanted, with an answer of one token.
    tandem/sampling/penalties.py defines the penalties.

    The same (seed, position, token) always draws the same noise, so the choice does not depend on batch, worker or
    tensor-parallel width (docs/architecture.md, Determinism).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    grammar: str | None = None
    min_tokens: int = 0
    embeds: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether the chosen token may differ from that of the model's own logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias or self.min_tokens)

    @classmethod
    def parse(
        cls,
        *,
        seed: int,
        max_tokens: int,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        logprobs: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int | None = None,
        grammar: str | None = None,
        min_tokens: int = 0,
        embeds: bool = False,
    ) -> SamplingParams:
        """None takes the default. Raises InputError naming the field."""
        params = cls(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=top_k or None,
            min_p=0.0 if min_p is None else float(min_p),
            seed=seed % 2**64,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            presence_penalty=float(presence_penalty or 0.0),
            frequency_penalty=float(frequency_penalty or 0.0),
            repetition_penalty=1.0 if repetition_penalty is None else float(repetition_penalty),
            logit_bias=tuple(sorted((logit_bias or {}).items())),
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            min_tokens=min_tokens,
            embeds=embeds,
        )
        params._check()
        return params

    def _check(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k is not None:
            _check_range("top_k", self.top_k, 1, 2**31 - 1)
        _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.embeds and self.max_tokens != 1:
            raise InputError(f"max_tokens: expected 1 with an embedding, got {self.max_tokens}", field="max_tokens")
        if self.min_tokens and self.grammar is not None:
            raise InputError("min_tokens: expected no constraint beside it; leave one of them out", field="min_tokens")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, low_open=True)
        check_length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def check_length(name: str, length: int, most: int) -> None:
    """Raises InputError naming the field."""
    if length > most:
        raise InputError(f"{name}: expected at most {most}, got {length}", field=name)


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    is_enough = low < value if low_open else low <= value
    if not (is_enough and value <= high):  # NaN is neither; an integer may be too large for a float
        bound = "greater than" if low_open else "at least"
        said = f"{name}: expected a number {bound} {low:g} and at most {high:g}, got {shown(value)}"
        raise InputError(said, field=name)
