"""Logs requests, and reports their ends to the calls that made them."""

from __future__ import annotations

import logging
from dataclasses import asdict

from kvtransfer.causes import HandoffFault
from router.observe.trace_store import Traces
from router.requests import actions as act
from router.requests.facts import Facts, Requeued
from router.requests.state_machine import RequestRun
from tandem.errors import ErrorCode
from tandem.request import SamplingParams

log = logging.getLogger(__name__)


class RequestLog:
    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(act.HandoffFailed, "request_log", self._handoff_failed)
        facts.subscribe(Requeued, "request_log", self._requeued)
        facts.subscribe(act.End, "request_log", self._ended)
        facts.subscribe(act.End, "calls", _end_call)

    def _handoff_failed(self, run: RequestRun, fact: act.HandoffFailed, now_s: float) -> None:
        fields = {"cause": fact.error.cause.value if isinstance(fact.error, HandoffFault) else fact.error.code.value}
        for role, worker in (("prefill", run.prefill), ("decode", run.decode)):
            fields[role] = "" if worker is None else worker.worker_id
        log.warning("handoff failed", extra=self._traces.of(run).names() | fields | {"error": str(fact.error)})

    def _requeued(self, run: RequestRun, fact: Requeued, now_s: float) -> None:
        fields = {"cause": str(fact.cause), "answer_tokens": str(run.answer_tokens)}
        log.info("request requeued", extra=self._traces.of(run).names() | fields)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if fact.error is None:
            return
        if fact.error.code is ErrorCode.INTERNAL:
            log.error("request failed", extra=self._traces.of(run).names() | {"error": str(fact.error)})
        elif fact.error.code is ErrorCode.QUARANTINED:
            log.error(
                "request quarantined", extra=self._traces.of(run).names() | {"error": str(fact.error)} | _shape(run)
            )


def _shape(run: RequestRun) -> dict[str, str]:
    """What may have made its workers die, without its content: sizes, and the sampling parameters that it set."""
    shape = {"prompt_tokens": str(run.request.prompt_tokens), "answer_tokens": str(run.answer_tokens)}
    default = asdict(SamplingParams())
    for name, value in asdict(run.request.sampling).items():
        if value != default[name] and name != "seed":
            shape[name] = f"{len(value)} entries" if isinstance(value, tuple | frozenset) else str(value)
    return shape


def _end_call(run: RequestRun, fact: act.End, now_s: float) -> None:
    """Feeds the audit log and the rate limits."""
    if (call := run.terms.call) is not None:
        call.ended(fact.state, None if fact.error is None else fact.error.code, fact.usage.completion_tokens)
