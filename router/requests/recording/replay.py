"""Feeds a recording to the same core again and compares every action and every placement.

A recording may be cut off at either end, be longer than memory, or come from a newer version: what can be replayed is,
and the rest is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from kvtransfer.causes import HandoffFault, parse_cause
from router.policies.placement import PlacementPolicy, named_policy
from router.policies.types import Candidate, PlacementQuery
from router.prefix_index.mirror import WorkerKey
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.output import TextPiece
from router.requests.recording.recorder import (
    KIND,
    READABLE,
    EventSeen,
    Line,
    PlacementRecord,
    RecordingHeader,
    RunStarted,
    TokensPassed,
    candidate_from,
    crc_of,
    encoder,
    placement_outcome,
    render,
    sampling_from,
)
from router.requests.state_machine import RequestRun
from tandem.config.router import RouterSpec
from tandem.errors import ErrorCode, InputError, TandemError, error_from_code
from tandem.images import PromptImage
from tandem.kvcache.blockhash import BlockHash
from tandem.request import FinishReason, SamplingParams

MAX_LINE_BYTES = 16 << 20
KEPT_RUNS = 4096  # that ended
_EVENTS: dict[str, type[Any]] = {each.__name__: each for each in ev.Event.__args__}
_decoder = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Difference:
    """`line` counts from 1. What was recorded, and what the core does now."""

    line: int
    request_id: str
    what: str
    recorded: list[Any]
    replayed: list[Any]


@dataclass(slots=True)
class ReplayReport:
    """`skipped`: lines that could not be replayed, with the reason, the first of each kind."""

    runs: int = 0
    events: int = 0
    tokens: int = 0
    placements: int = 0
    differences: int = 0
    first: Difference | None = None
    skipped: dict[str, int] = field(default_factory=dict)  # by reason: how many lines

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def differ(self, difference: Difference) -> None:
        self.differences += 1
        self.first = self.first or difference


@dataclass(frozen=True, slots=True)
class Step:
    """One replayed line, for `tandem replay --steps`."""

    line: int
    request_id: str
    at_s: float
    event: str
    actions: list[dict[str, Any]]
    state: str


@dataclass(frozen=True, slots=True)
class _Token:
    token_id: int
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    from_prediction: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """As much of a request as a recording keeps."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    block_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    session: bytes | None = None
    adapter: str = ""
    adapter_name: str = ""
    images: tuple[PromptImage, ...] = ()


@dataclass(slots=True)
class _Assembler:
    """Stops where the recorded one did."""

    stopped: bool = False
    stop_string: str | None = None

    def push(self, token: Any) -> TextPiece:
        return TextPiece("", (token,))

    def flush(self) -> TextPiece | None:
        return None


@dataclass(slots=True)
class _Replayed:
    run: RequestRun
    assembler: _Assembler
    stops: frozenset[int]


class Replay:
    """`on_step` sees every replayed line of a run."""

    def __init__(self, on_step: Callable[[Step], None] = lambda step: None) -> None:
        self.report = ReplayReport()
        self._on_step = on_step
        self._runs: dict[str, _Replayed] = {}
        self._ended: deque[str] = deque()
        self._policy: PlacementPolicy | None = None
        self._text = False

    def run(self, source: BinaryIO) -> ReplayReport:
        """Reads to the end. Raises InputError when it is no recording, or of another version."""
        lines = _lines(source, self.report)
        self._header(next(lines, (1, b"")))
        for number, raw in lines:
            try:
                line = _decoder.decode(raw)
            except (msgspec.MsgspecError, RecursionError):
                self.report.skip("cut off, or written by another version")
                continue
            try:
                self._replay(number, line)
            except Exception:  # whatever a damaged line leads to, the next may be whole
                self.report.skip("damaged, or lines before it are missing")
        return self.report

    def _header(self, first: tuple[int, bytes]) -> None:
        try:
            header = _decoder.decode(first[1])
        except (msgspec.MsgspecError, RecursionError):
            header = None
        if not first[1]:
            raise InputError("recording: it is empty: the router has recorded nothing in it yet")
        if not isinstance(header, RecordingHeader) or header.format != KIND:
            raise InputError(
                "recording: expected a file that router.record wrote, got another, or one without its header"
            )
        if header.version not in READABLE:
            raise InputError(
                f"recording: expected version {' or '.join(map(str, READABLE))}, got {header.version} "
                f"(tandem {header.tandem}); replay it with the release that wrote it"
            )
        self._text = header.text
        try:
            spec = RouterSpec.model_validate(header.spec)
        except ValueError as error:
            raise InputError(f"recording: its router configuration is not of this release: {error}") from None
        self._policy = named_policy(spec, seed=header.seed)

    def _replay(self, number: int, line: Line) -> None:
        match line:
            case RunStarted():
                self._start(line)
            case EventSeen():
                self._event(number, line)
            case TokensPassed():
                self._tokens(number, line)
            case PlacementRecord():
                self._placement(number, line)
            case _:
                pass  # the header of the next segment

    def _start(self, line: RunStarted) -> None:
        sampling = sampling_from(line.sampling)
        request = RecordedRequest(
            line.id, line.model, tuple(line.prompt), line.prompt_tokens, sampling, line.block_tokens
        )
        assembler = _Assembler()
        run = RequestRun(request, assembler, RequestTerms("", deadline_s=line.deadline_s), line.at, line.max_migrations)
        self._runs[line.id] = _Replayed(run, assembler, sampling.stop_token_ids)
        self.report.runs += 1

    def _event(self, number: int, line: EventSeen) -> None:
        found = self._runs.get(line.id)
        if found is None:
            self.report.skip("of a request that began before the recording")
            return
        event = event_from(line.event)
        if event is None:
            self.report.skip(f"an event this release does not know: {line.event.get('type')}")
            return
        found.assembler.stopped = line.stopped
        actions = self._do(found, event, line.at)
        self.report.events += 1
        replayed = msgspec.json.decode(encoder.encode([render(each, found.stops, self._text) for each in actions]))
        if _comparable(replayed) != _comparable(line.actions):
            self.report.differ(Difference(number, line.id, str(line.event.get("type")), line.actions, replayed))
        self._on_step(Step(number, line.id, line.at, str(line.event.get("type")), replayed, found.run.state.value))
        if found.run.state.is_end:
            self._forget(line.id)

    def _forget(self, request_id: str) -> None:
        """Later: a report of its handoff may still come."""
        self._ended.append(request_id)
        if len(self._ended) > KEPT_RUNS:
            self._runs.pop(self._ended.popleft(), None)

    def _tokens(self, number: int, line: TokensPassed) -> None:
        found = self._runs.get(line.id)
        if found is None:
            self.report.skip("of a request that began before the recording")
            return
        crc, replayed = 0, []
        for index, (at_s, token_id) in enumerate(line.tokens):
            event = ev.TokenSampled(line.worker, _Token(token_id, 0, *line.proposals.get(index, ())))
            actions = self._do(found, event, at_s)
            replayed += [type(each).__name__ for each in actions]
            crc = crc_of(actions, found.stops, crc)
        self.report.tokens += len(line.tokens)
        if crc != line.crc:
            self.report.differ(Difference(number, line.id, f"{len(line.tokens)} tokens", [line.crc], [crc, *replayed]))
        last_s = line.tokens[-1][0] if line.tokens else 0.0
        self._on_step(Step(number, line.id, last_s, f"{len(line.tokens)} tokens", [], found.run.state.value))

    @staticmethod
    def _do(found: _Replayed, event: ev.Event, at_s: float) -> list[act.Action]:
        actions = found.run.on(event, at_s)
        done = list(actions)
        actions.clear()
        return done

    def _placement(self, number: int, line: PlacementRecord) -> None:
        assert self._policy is not None
        query = msgspec.convert(line.query, PlacementQuery)
        decode, prefill = ([candidate_from(each) for each in pool] for pool in (line.decode, line.prefill))
        replayed = placement_outcome(self._policy.place(query, decode, prefill))
        self.report.placements += 1
        if replayed != line.outcome:
            self.report.differ(Difference(number, line.id, "placement", line.outcome, replayed))
        found = self._runs.get(line.id)
        candidates = [*_candidates("Decode", decode), *_candidates("Prefill", prefill)]
        shown = [{"type": "Outcome", "outcome": replayed}, *candidates]
        state = "" if found is None else found.run.state.value
        self._on_step(Step(number, line.id, line.at, "placement", shown, state))


def _candidates(role: str, pool: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    """What a reader looks for first in the candidates of a placement."""
    for each in pool:
        yield {
            "type": role,
            "worker": each.worker_epoch,
            "cached_tokens": each.cached_tokens,
            "outstanding_tokens": each.outstanding_tokens,
            "running_requests": each.running_requests,
            "free_blocks": each.free_blocks,
        }


def event_from(fields: dict[str, Any]) -> ev.Event | None:
    """The event as `render` wrote it; None: not of this release."""
    kind = _EVENTS.get(str(fields.get("type")))
    if kind is None:
        return None
    given = {name: _value(name, each) for name, each in fields.items() if name != "type"}
    wanted = {name: given.get(name) for name in kind.__struct_fields__}
    event: ev.Event = kind(**wanted)
    return event


def _value(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("worker", "decode", "prefill", "target"):
        return WorkerKey(*value)
    if name in ("error", "cause"):
        return _error(value)
    if name == "token":
        return _Token(**value)
    if name == "tokens":
        return [_Token(each) for each in value]
    return FinishReason(value) if name == "reason" else value


def _error(value: dict[str, str]) -> TandemError:
    if value["code"] == ErrorCode.HANDOFF_FAILED and "cause" in value:
        return HandoffFault(parse_cause(value["cause"]), value["message"])
    return error_from_code(value["code"], value["message"])


def _comparable(actions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without text, which a replay does not make again: pieces that hold text alone are left out."""
    kept = []
    for each in actions:
        if each["type"] != "TextPiece":
            kept.append(each)
        elif each["tokens"]:
            kept.append({name: value for name, value in each.items() if name != "text"})
    return kept


def _lines(source: BinaryIO, report: ReplayReport) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1; one longer than MAX_LINE_BYTES is left out without being read into memory whole."""
    number = 0
    while raw := source.readline(MAX_LINE_BYTES):
        number += 1
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := source.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            report.skip(f"longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        yield number, raw
