"""Plays a trace against a server, open loop: a request is due when the trace says so, whatever became of those before
it, and its latencies count from then. A client that is late (no connection free, no processor) makes them longer, and
never leaves a request out: nothing is hidden by what is called coordinated omission."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.cli.load.client import Answer, Ask, Client
from cluster.cli.load.prompts import Prompts
from planner.simulator.outcome import LatencyPercentiles, Outcome, outcome_fields
from planner.simulator.recorder import Recorder
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from tandem.errors import DeadlineExceeded, ErrorCode, InputError, TandemError
from tandem.request import RequestState

LATE_S = 0.01  # a client later than this distorts what it measures, which is said
_LEAD_S = 0.1
_CLASS = re.compile(r"[\w.-]{1,64}", re.ASCII)  # it goes into a header
# What a server says before it answers, and would not say with room or on another request.
_REFUSALS = {
    ErrorCode.OVERLOADED,
    ErrorCode.RATE_LIMITED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.NO_WORKER,
    ErrorCode.KV_EXHAUSTED,
    ErrorCode.CONTEXT_EXCEEDED,
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.PAYLOAD_TOO_LARGE,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """`connections`: requests under way at once; further ones wait, and their latency grows."""

    connections: int = 1024
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult(Outcome):
    """`send_lag_s`: by how much requests were sent later than they were due."""

    target: str
    send_lag_s: LatencyPercentiles


Progress = Callable[[int], None]  # requests that have ended


@dataclass(slots=True)
class _Seen:
    """Beside the recorder: what servers say at the end of an answer."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    lag_s: list[float] = field(default_factory=list)
    says_cached: bool = False
    says_handoffs: bool = False
    kv_bytes: int = 0


class Player:
    def __init__(
        self,
        trace: TrafficTrace,
        prompts: Prompts,
        client: Client,
        slo: Slo,
        limits: Limits,
        progress: Progress | None = None,
    ) -> None:
        """Raises InputError for a class that no request can name."""
        for priority, _ in trace.labels:
            if priority and _CLASS.fullmatch(priority) is None:
                expected = "letters, digits, '_', '.' and '-'"
                raise InputError(f"{trace.name}: class: expected {expected}, got {priority[:40]!r}", field="class")
        self._trace, self._prompts, self._client, self._limits = trace, prompts, client, limits
        self._slo, self._progress = slo, progress
        self._recorder = Recorder(len(trace), trace.arrival_s, slo)
        self._seen = _Seen(trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
        self._connections = asyncio.Semaphore(limits.connections)
        self._start_s = 0.0
        self._due = 0  # so many requests have been due

    async def warm_up(self, requests: int) -> None:
        """Opens connections, and tells at once what would be wrong with every request. Raises TandemError."""
        for number in range(requests):
            prompt = self._prompts.other(number, 32)
            async with _within(self._limits.timeout_s):
                await self._client.send(Ask(prompt, 2), lambda tokens: None)

    async def play(self, target: str) -> LoadResult:
        """To the end of the last request. Cancelled: what has ended by then, with `complete` False."""
        loop = asyncio.get_running_loop()
        self._start_s = loop.time() + _LEAD_S
        under_way: set[asyncio.Task[None]] = set()
        try:
            for index, arrival_s in enumerate(self._trace.arrival_s.tolist()):
                ask = self._ask(index)  # drawn before it is due
                await asyncio.sleep(self._start_s + arrival_s - loop.time())
                task = loop.create_task(self._one(index, ask))
                self._due = index + 1
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            await asyncio.gather(*under_way)
        except asyncio.CancelledError:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            if not self._due:
                raise
        return self._result(target)

    def _ask(self, index: int) -> Ask:
        priority, _ = self._trace.label_of(index)
        return Ask(self._prompts.of(index), int(self._trace.output_tokens[index]), priority)

    async def _one(self, index: int, ask: Ask) -> None:
        record, arrival_s = self._recorder, float(self._trace.arrival_s[index])
        async with self._connections:
            self._seen.lag_s.append(max(0.0, self._now_s() - arrival_s))
            try:
                async with _within(self._limits.timeout_s):
                    answer = await self._client.send(ask, lambda tokens: self._heard(index, tokens))
            except TandemError as error:
                record.refusals[error.code.value] = record.refusals.get(error.code.value, 0) + 1
                refused = error.code in _REFUSALS and np.isnan(record.first_token_s[index])
                record.end(index, RequestState.REJECTED if refused else RequestState.FAILED)
            else:
                self._note(index, arrival_s, answer)
        if self._progress is not None:
            self._progress(record.ended)

    def _heard(self, index: int, tokens: int) -> None:
        record, now_s = self._recorder, self._now_s()
        if np.isnan(record.first_token_s[index]):
            record.first_token(index, now_s)
        else:
            record.intervals.add(now_s - float(record.last_token_s[index]))
        record.intervals.add(0.0, max(0, tokens - 1))  # that came together with one before them
        record.last_token_s[index] = now_s

    def _note(self, index: int, arrival_s: float, answer: Answer) -> None:
        record, seen = self._recorder, self._seen
        if not answer.output_tokens or np.isnan(record.first_token_s[index]):
            record.refusals["empty_answer"] = record.refusals.get("empty_answer", 0) + 1
            record.end(index, RequestState.FAILED)
            return
        seen.output_tokens[index] = answer.output_tokens
        if answer.prompt_tokens is not None:
            seen.prompt_tokens[index] = answer.prompt_tokens
        if answer.cached_tokens is not None:
            seen.says_cached = True
            record.cached_tokens[index] = answer.cached_tokens
        if answer.queue_s is not None:
            record.dispatched_s[index] = arrival_s + answer.queue_s
        if answer.handed_off is not None:
            seen.says_handoffs = True
            record.handoffs += answer.handed_off
            seen.kv_bytes += answer.kv_bytes_moved or 0
        record.end(index, RequestState.FINISHED)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def _result(self, target: str) -> LoadResult:
        recorder, seen, asked = self._recorder.head(self._due), self._seen, self._trace.head(self._due)
        lag_s = LatencyPercentiles.of(np.array(seen.lag_s))
        served = replace(
            asked,
            prompt_tokens=np.array(seen.prompt_tokens[: self._due], np.int64),
            output_tokens=np.array(seen.output_tokens[: self._due], np.int64),
            notes=(*asked.notes, *self._notes(recorder, lag_s)),
        )
        fields = outcome_fields(served, self._slo, recorder)
        fields |= {"complete": recorder.ended == len(self._trace)}
        fields |= {} if seen.says_cached else {"hit_rate": None}
        fields |= {} if seen.says_handoffs else {"handoffs": None}
        kv_bytes = float(seen.kv_bytes) if seen.says_handoffs else None
        return LoadResult(**fields, kv_bytes_moved=kv_bytes, target=target, send_lag_s=lag_s)

    def _notes(self, recorder: Recorder, lag_s: LatencyPercentiles) -> list[str]:
        notes = []
        if lag_s.p99 is not None and lag_s.p99 > LATE_S:
            notes.append(
                f"1 % of the requests were sent at least {lag_s.p99:.3f} s late: this client had no processor or no "
                "connection (--connections) for them, and that is in their latencies"
            )
        for name, got, wanted in (
            ("prompts", self._seen.prompt_tokens, self._trace.prompt_tokens),
            ("answers", self._seen.output_tokens, self._trace.output_tokens),
        ):
            mine = recorder.finished
            longer = np.array(got[: self._due])[mine].sum() / max(1, wanted[: self._due][mine].sum()) - 1
            if abs(longer) > 0.01:
                notes.append(f"{name} were {abs(longer):.0%} {'longer' if longer > 0 else 'shorter'} than in the trace")
        return notes


class _within:
    """A deadline that is told as a TandemError."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise DeadlineExceeded(f"no whole answer within {self._seconds:g} s (--timeout)") from None
