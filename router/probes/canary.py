"""Canaries: tiny requests that the router sends to chosen workers on the path of clients' requests.

Canaries are not queued, not charged to workers, not counted in the metrics of clients' requests, and not retried on
other workers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from router.observe.metrics.health import CanaryResult
from router.request_terms import RequestTerms
from router.requests.actions import Action, ChooseDecode, End, Frame, Opening, Requeue
from router.requests.events import Cancelled, Event, Queued, Started, Submitted, WorkerGone
from router.requests.output import OutputAssembler
from router.requests.raw_request import ValidRequest
from router.requests.run_on_links import RunOnLinks
from router.requests.state_machine import RequestRun
from router.workers.fleet import Fleet, Worker
from tandem.clock import Clock
from tandem.errors import WorkerLost
from tandem.request import SamplingParams

CANARY_ID_PREFIX = "canary-"
PROMPT = (0,)  # a token of every model; less than a block, so never cached
ANSWER_TOKENS = 2  # in a handoff, each of the two workers samples one


class _EmptyDecoder:
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def fixed_text(self, token_id: int) -> str | None:
        return ""


class Canary:
    """One canary with its own run on the links. Calls `on_end` exactly once."""

    def __init__(
        self, model: str, fleet: Fleet, clock: Clock, timeout_s: float, on_end: Callable[[CanaryResult], None]
    ) -> None:
        self._clock = clock
        self._on_end = on_end
        self._was_refused = False
        request = ValidRequest(
            request_id=CANARY_ID_PREFIX + secrets.token_hex(8),
            model=model,
            prompt=PROMPT,
            sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS),
            stop=(),
            block_hashes=(),
            block_tokens=1,
        )
        terms = RequestTerms(priority="")  # it is not queued
        assembler = OutputAssembler(_EmptyDecoder(), PROMPT, (), frozenset())
        self._run = RequestRun(request, assembler, terms, clock.now_s(), max_migrations=0)
        self._on_links = RunOnLinks(self._run, request, None, self, fleet.link)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.cancel)

    def start(self, decode: Worker, prefill: Worker | None) -> None:
        for event in (Submitted(), Queued(), Started(decode.key, None if prefill is None else prefill.key)):
            self.on(self._run, event)

    def cancel(self) -> None:
        """Ends the canary as failed."""
        self.on(self._run, Cancelled())

    # ---- as router.requests.run_on_links.EventSink

    def on(self, run: RequestRun, event: Event) -> None:
        run.on(event, self._clock.now_s())
        run.carry_out(self.perform)

    def perform(self, run: RequestRun, action: Action) -> None:
        match action:
            case Frame():
                if self._on_links.send(action) is None and isinstance(action, Opening):
                    self.on(run, WorkerGone(action.worker, WorkerLost(f"worker {action.worker.worker_id} was lost")))
            case ChooseDecode():
                self._was_refused = True
                self.cancel()
            case Requeue(refused=refused):
                self._was_refused = refused
                self.cancel()
            case End(final=final):
                self._timer.cancel()
                failed = CanaryResult.REFUSED if self._was_refused else CanaryResult.FAILED
                self._on_end(failed if final is None else CanaryResult.PASSED)
            case _:
                pass  # nothing reads its answer or its facts
