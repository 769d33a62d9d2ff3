"""Plays a trace against a server, open loop.

Each request is due at its time in the trace, whether or not earlier ones have ended, and its latencies count from then.
If this client is late (no free connection or CPU), latencies grow, but no request is left out: there is no coordinated
omission.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.cli.load.client import LoadClient, LoadRequest, LoadResponse
from cluster.cli.load.prompts import Prompts
from planner.simulator.measurements import RunMeasurements
from planner.simulator.outcome import LatencyQuantiles, Outcome, outcome_fields
from planner.simulator.setup import Slo
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.errors import DeadlineExceeded, ErrorCode, InputError, TandemError
from tandem.request import RequestState

LATE_S = 0.01  # a client that sends later than this distorts the measurement, and a note says so
_LEAD_S = 0.1
_CLASS = re.compile(r"[\w.-]{1,64}", re.ASCII)  # the class is sent in a header
# Refusals before the first token, which depend on the server's load or the request's size.
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
class LoadLimits:
    """`connections`: maximum concurrent requests. Further requests wait, which counts as latency."""

    connections: int = 1024
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult(Outcome):
    """`send_lag_s`: how late requests were sent, in seconds after they were due."""

    target: str
    send_lag_s: LatencyQuantiles


Progress = Callable[[int], None]  # requests that have ended


@dataclass(slots=True)
class _Reported:
    """What the server reports at the end of responses, beside our own measurements."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    lag_s: list[float] = field(default_factory=list)
    has_cached: bool = False
    has_handoffs: bool = False
    kv_bytes: int = 0


class Player:
    def __init__(
        self,
        trace: TrafficTrace,
        prompts: Prompts,
        client: LoadClient,
        slo: Slo,
        limits: LoadLimits,
        progress: Progress | None = None,
    ) -> None:
        """Raises InputError for a priority class that cannot be sent in a header."""
        for priority, _ in trace.labels:
            if priority and _CLASS.fullmatch(priority) is None:
                expected = "letters, digits, '_', '.' and '-'"
                raise InputError(f"{trace.name}: class: expected {expected}, got {priority[:40]!r}", field="class")
        self._trace, self._prompts, self._client, self._limits = trace, prompts, client, limits
        self._slo, self._progress = slo, progress
        self._measurements = RunMeasurements(trace, slo)
        self._reported = _Reported(trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
        self._connections = asyncio.Semaphore(limits.connections)
        self._start_s = 0.0
        self._due = 0  # number of requests that were due so far

    async def warm_up(self, requests: int) -> None:
        """Sends requests that are not measured. Raises the TandemError that every request would get."""
        for number in range(requests):
            prompt = self._prompts.warm_up(number, 32)
            async with _request_timeout(self._limits.timeout_s):
                await self._client.send(LoadRequest(prompt, 2), lambda tokens: None)

    async def play(self, target: str) -> LoadResult:
        """Runs until the last request has ended. If cancelled, returns what has ended, with `complete` False."""
        loop = asyncio.get_running_loop()
        self._start_s = loop.time() + _LEAD_S
        running: set[asyncio.Task[None]] = set()
        try:
            for index, arrival_s in enumerate(self._trace.arrival_s.tolist()):
                request = self._request(index)  # draw the prompt before the request is due
                await asyncio.sleep(self._start_s + arrival_s - loop.time())
                task = loop.create_task(self._run_one(index, request))
                self._due = index + 1
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if not self._due:
                raise
        return self._result(target)

    def _request(self, index: int) -> LoadRequest:
        priority, _ = self._trace.label_of(index)
        return LoadRequest(self._prompts.of(index), int(self._trace.output_tokens[index]), priority)

    @property
    def times(self) -> MeasuredTimes:
        """What each finished request took; NaN for others. They began in the clock of the event loop."""
        found = self._measurements
        ttft_s = np.where(found.finished, found.first_token_s - self._trace.arrival_s, np.nan)
        decode_s = np.where(found.finished, found.last_token_s - found.first_token_s, np.nan)
        return MeasuredTimes(ttft_s, decode_s, self._start_s)

    async def _run_one(self, index: int, request: LoadRequest) -> None:
        measured, arrival_s = self._measurements, float(self._trace.arrival_s[index])
        async with self._connections:
            self._reported.lag_s.append(max(0.0, self._now_s() - arrival_s))
            try:
                async with _request_timeout(self._limits.timeout_s):
                    response = await self._client.send(request, lambda tokens: self._received(index, tokens))
            except TandemError as error:
                measured.refusals[error.code.value] = measured.refusals.get(error.code.value, 0) + 1
                refused = error.code in _REFUSALS and np.isnan(measured.first_token_s[index])
                measured.end(index, RequestState.REJECTED if refused else RequestState.FAILED)
            else:
                self._record_response(index, arrival_s, response)
        if self._progress is not None:
            self._progress(measured.ended)

    def _received(self, index: int, tokens: int) -> None:
        measured, now_s = self._measurements, self._now_s()
        if np.isnan(measured.first_token_s[index]):
            measured.first_token(index, now_s)
        else:
            measured.intervals.add(now_s - float(measured.last_token_s[index]))
        measured.intervals.add(0.0, max(0, tokens - 1))  # tokens that arrived together with the previous one
        measured.last_token_s[index] = now_s

    def _record_response(self, index: int, arrival_s: float, response: LoadResponse) -> None:
        measured, reported = self._measurements, self._reported
        if not response.output_tokens or np.isnan(measured.first_token_s[index]):
            measured.refusals["empty_answer"] = measured.refusals.get("empty_answer", 0) + 1
            measured.end(index, RequestState.FAILED)
            return
        reported.output_tokens[index] = response.output_tokens
        if response.prompt_tokens is not None:
            reported.prompt_tokens[index] = response.prompt_tokens
        if response.cached_tokens is not None:
            reported.has_cached = True
            measured.cached_tokens[index] = response.cached_tokens
        if response.queue_s is not None:
            measured.dispatched_s[index] = arrival_s + response.queue_s
        if response.handed_off is not None:
            reported.has_handoffs = True
            measured.handoffs += response.handed_off
            reported.kv_bytes += response.kv_bytes_moved or 0
        measured.end(index, RequestState.FINISHED)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def _result(self, target: str) -> LoadResult:
        measured, reported, played = self._measurements.head(self._due), self._reported, self._trace.head(self._due)
        lag_s = LatencyQuantiles.of(np.array(reported.lag_s))
        served = replace(
            played,
            prompt_tokens=np.array(reported.prompt_tokens[: self._due], np.int64),
            output_tokens=np.array(reported.output_tokens[: self._due], np.int64),
            notes=(*played.notes, *self._notes(measured, lag_s)),
        )
        fields = outcome_fields(served, self._slo, measured)
        fields |= {"complete": measured.ended == len(self._trace)}
        fields |= {} if reported.has_cached else {"hit_rate": None}
        fields |= {} if reported.has_handoffs else {"handoffs": None}
        kv_bytes = float(reported.kv_bytes) if reported.has_handoffs else None
        return LoadResult(**fields, kv_bytes_moved=kv_bytes, target=target, send_lag_s=lag_s)

    def _notes(self, measured: RunMeasurements, lag_s: LatencyQuantiles) -> list[str]:
        notes = []
        if lag_s.p99 is not None and lag_s.p99 > LATE_S:
            notes.append(
                f"1 % of the requests were sent at least {lag_s.p99:.3f} s late, which their latencies include: this "
                "client had no free CPU or connection (--connections)"
            )
        for name, got, wanted in (
            ("prompts", self._reported.prompt_tokens, self._trace.prompt_tokens),
            ("answers", self._reported.output_tokens, self._trace.output_tokens),
        ):
            mine = measured.finished
            longer = np.array(got[: self._due])[mine].sum() / max(1, wanted[: self._due][mine].sum()) - 1
            if abs(longer) > 0.01:
                notes.append(f"{name} were {abs(longer):.0%} {'longer' if longer > 0 else 'shorter'} than in the trace")
        return notes


class _request_timeout:
    """A timeout that raises DeadlineExceeded."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise DeadlineExceeded(f"expected the whole response within {self._seconds:g} s (--timeout)") from None
