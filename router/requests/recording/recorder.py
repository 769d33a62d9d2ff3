"""What a router writes down of its decisions, so that a failure in production can be replayed: events in, actions out.

A recording is lines of JSON. The first is a `RecordingHeader`; then, per request and in order, its `RunStarted`, its
events with the actions they led to, and every placement with the candidates it was chosen from. Tokens that only pass
through are joined into one line. Without `text`, token ids other than stop tokens are replaced, and no text is kept.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec

from kvtransfer.causes import HandoffFault
from router.policies.types import Candidate, Placement
from router.prefix_index.mirror import WorkerKey
from router.requests import actions as act
from router.requests import events as ev
from router.requests.output import TextPiece
from router.requests.placer import PlacementSeen
from router.requests.state_machine import RequestRun
from tandem.errors import TandemError
from tandem.request import SamplingParams

log = logging.getLogger(__name__)

VERSION = 3  # counts proposed tokens
READABLE = (2, 3)
KIND = "tandem-recording"
MAX_JOINED_TOKENS = 256

_PASSING = (TextPiece, act.TokenGaps)


class RecordingHeader(msgspec.Struct, frozen=True, tag="header"):
    """`spec`: the router's configuration; `seed`: of its placement policy."""

    format: str
    version: int
    tandem: str
    router_id: str
    text: bool
    seed: int
    spec: dict[str, Any]


class RunStarted(msgspec.Struct, frozen=True, tag="run"):
    """`at`: when it was received. `prompt`: with text, or as its scores are compared with it; else empty."""

    id: str
    at: float
    model: str
    prompt_tokens: int
    block_tokens: int
    sampling: dict[str, Any]
    deadline_s: float | None
    max_migrations: int
    prompt: Sequence[int] = ()


class EventSeen(msgspec.Struct, frozen=True, tag="event"):
    """`stopped`: a stop string was complete after this event."""

    id: str
    at: float
    event: dict[str, Any]
    actions: list[dict[str, Any]]
    stopped: bool = False


class TokensPassed(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Tokens of a decoding request: (time, id) each. `crc`: of the actions they led to. `proposals`: by number of the
    token that has them: (proposed, accepted, whether from the prediction)."""

    id: str
    worker: WorkerKey
    tokens: list[tuple[float, int]]
    crc: int
    proposals: dict[int, tuple[int, int, bool]] = msgspec.field(default_factory=dict)


class PlacementRecord(msgspec.Struct, frozen=True, tag="placement"):
    """`outcome`: as `placement_outcome` gives it."""

    id: str
    at: float
    query: dict[str, Any]
    decode: list[dict[str, Any]]
    prefill: list[dict[str, Any]]
    outcome: list[Any]


Line = RecordingHeader | RunStarted | EventSeen | TokensPassed | PlacementRecord
encoder = msgspec.json.Encoder(enc_hook=lambda value: plain(value))
_Write = Callable[[bytes], None]


class Recorder:
    """Runs on the event loop's thread. `write` takes one line, without its end, and must not block."""

    def __init__(self, write: _Write, *, text: bool) -> None:
        self.failures = 0
        self.placements: list[PlacementSeen] = []
        self._write, self._text = write, text
        self._passed: dict[str, TokensPassed] = {}

    def on(self, run: RequestRun, event: ev.Event, now_s: float) -> deque[act.Action]:
        """`run.on(event, now_s)`, written down."""
        before = len(run.actions)
        actions = run.on(event, now_s)
        try:
            self._note(run, event, now_s, list(itertools.islice(actions, before, None)))
        except Exception:  # a fault in writing must not keep the actions from being carried out
            self._failed()
        return actions

    def _note(self, run: RequestRun, event: ev.Event, now_s: float, led_to: list[act.Action]) -> None:
        if isinstance(event, ev.Submitted):
            self._started(run)
        stops = run.request.sampling.stop_token_ids
        if isinstance(event, ev.TokenSampled) and all(isinstance(each, _PASSING) for each in led_to):
            self._pass(run, event, now_s, led_to)
            return
        self._flush(run.request.request_id)
        seen = EventSeen(
            run.request.request_id,
            now_s,
            render(event, stops, self._text),
            [render(each, stops, self._text) for each in led_to],
            run.stopped,
        )
        self._write(encoder.encode(seen))

    def placed(self, run: RequestRun, now_s: float) -> None:
        """Writes what the placer has decided since the last call."""
        placements = list(self.placements)
        self.placements.clear()
        try:
            self._note_placements(run, placements, now_s)
        except Exception:  # as in `on`
            self._failed()

    def _failed(self) -> None:
        if not self.failures:
            log.exception("a decision could not be recorded; further failures are only counted")
        self.failures += 1

    def _note_placements(self, run: RequestRun, placements: Sequence[PlacementSeen], now_s: float) -> None:
        for seen in placements:
            record = PlacementRecord(
                run.request.request_id,
                now_s,
                msgspec.to_builtins(seen.query, enc_hook=plain),
                [_candidate_fields(each) for each in seen.decode],
                [_candidate_fields(each) for each in seen.prefill],
                placement_outcome(seen.outcome),
            )
            self._write(encoder.encode(record))

    def _started(self, run: RequestRun) -> None:
        request = run.request
        prompt: Sequence[int] = ()
        if self._text or request.sampling.prompt_logprobs is not None:
            stops = request.sampling.stop_token_ids
            prompt = tuple(shown_token(each, stops, self._text) for each in request.prompt)
        started = RunStarted(
            request.request_id,
            run.received_s,
            request.model,
            request.prompt_tokens,
            request.block_tokens,
            msgspec.to_builtins(replace(request.sampling, logit_bias=()), enc_hook=plain),  # the core does not read it
            run.terms.deadline_s,
            run.max_migrations,
            prompt,
        )
        self._write(encoder.encode(started))

    def _pass(self, run: RequestRun, event: ev.TokenSampled, now_s: float, led_to: list[act.Action]) -> None:
        request_id, stops = run.request.request_id, run.request.sampling.stop_token_ids
        joined = self._passed.get(request_id)
        if joined is not None and (joined.worker != event.worker or len(joined.tokens) >= MAX_JOINED_TOKENS):
            self._flush(request_id)
            joined = None
        tokens = [] if joined is None else joined.tokens
        proposals = {} if joined is None else joined.proposals
        if (token := event.token).proposed_tokens:
            proposals[len(tokens)] = (token.proposed_tokens, token.accepted_tokens, token.from_prediction)
        tokens.append((now_s, shown_token(token.token_id, stops, self._text)))
        crc = crc_of(led_to, stops, 0 if joined is None else joined.crc)
        self._passed[request_id] = TokensPassed(request_id, event.worker, tokens, crc, proposals)

    def _flush(self, request_id: str) -> None:
        if (joined := self._passed.pop(request_id, None)) is not None:
            self._write(encoder.encode(joined))


def _candidate_fields(candidate: Candidate) -> dict[str, Any]:
    """`transfer_to` as [worker id, epoch, seconds per token] each: JSON has no keys of two parts."""
    fields: dict[str, Any] = msgspec.to_builtins(candidate, enc_hook=plain)
    return fields | {"transfer_to": [[*to, seconds] for to, seconds in candidate.transfer_to.items()]}


def candidate_from(fields: dict[str, Any]) -> Candidate:
    """Raises msgspec.ValidationError, ValueError."""
    pairs = {(worker_id, epoch): seconds for worker_id, epoch, seconds in fields.get("transfer_to", ())}
    return msgspec.structs.replace(msgspec.convert(fields | {"transfer_to": {}}, Candidate), transfer_to=pairs)


def placement_outcome(outcome: object) -> list[Any]:
    """["placed", decode, prefill or None, reason] or ["waits", reason]."""
    if isinstance(outcome, Placement):
        prefill = None if outcome.prefill is None else list(outcome.prefill.worker_epoch)
        return ["placed", list(outcome.decode.worker_epoch), prefill, outcome.reason.value]
    return ["waits", str(outcome)]


def crc_of(actions: Sequence[act.Action], stops: frozenset[int], before: int = 0) -> int:
    """Of actions as they are written without text; `before`: of those that precede them."""
    for each in actions:
        before = crc32(encoder.encode(render(each, stops, text=False)), before)
    return before


def shown_token(token_id: int, stops: frozenset[int], text: bool) -> int:
    """The id, or in its place the first that is no stop token."""
    if text or token_id in stops:
        return token_id
    return next(each for each in itertools.count() if each not in stops)


def render(value: ev.Event | act.Action, stops: frozenset[int], text: bool) -> dict[str, Any]:
    """An event or action as it is written: its type and fields, without tickets, reports and, unless asked, text."""
    shown: dict[str, Any] = {"type": type(value).__name__}
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if name in ("ticket", "report"):
            continue
        if name == "token":
            field = _token_fields(field, shown_token(field.token_id, stops, text))
        elif name == "first_token":
            field = shown_token(field, stops, text)
        elif name == "tokens":
            field = [shown_token(each.token_id, stops, text) for each in field]
        elif name == "token_ids":
            field = [shown_token(each, stops, text) for each in field]
        elif name == "text" and not text:
            continue
        elif isinstance(field, TandemError):
            field = plain(field)
        shown[name] = msgspec.to_builtins(field, enc_hook=plain)
    return shown


def _token_fields(token: ev.Token, shown_id: int) -> dict[str, int | bool]:
    fields: dict[str, int | bool] = {"token_id": shown_id, "cached_tokens": token.cached_tokens}
    if token.proposed_tokens:
        fields |= {"proposed_tokens": token.proposed_tokens, "accepted_tokens": token.accepted_tokens}
        fields["from_prediction"] = token.from_prediction
    return fields


def plain(value: object) -> object:
    """What msgspec does not write itself."""
    if isinstance(value, TandemError):
        error = {"code": value.code.value, "message": value.message}
        return error | ({"cause": value.cause.value} if isinstance(value, HandoffFault) else {})
    if isinstance(value, range):
        return list(value)
    raise NotImplementedError(f"expected a value of a recording, got {type(value).__name__}")


def sampling_from(fields: dict[str, Any]) -> SamplingParams:
    """Raises msgspec.ValidationError."""
    return msgspec.convert(fields, SamplingParams)
