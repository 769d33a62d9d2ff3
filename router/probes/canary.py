"""Canaries: tiny requests of the router's own, sent to chosen workers along the path that clients' requests take.

They have no queue, no place in the accounts, and show in no client's metrics; they are continued nowhere else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from enum import StrEnum

from kvtransfer.causes import HandoffFault
from router.observe.trace import Attempt
from router.requests.output import OutputAssembler
from router.requests.request import ValidRequest
from router.requests.run import RequestRun
from router.terms import Terms
from router.workers.fleet import Worker
from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.request import SamplingParams
from tandem.v1 import worker_pb2

CANARY_ID_PREFIX = "canary-"
PROMPT = (0,)  # a token that every model has; less than a block, so never found in a cache
ANSWER_TOKENS = 2  # the first is the prefill worker's, the second comes after the handoff


class CanaryResult(StrEnum):
    """A metric label."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"  # no room: nothing was learnt


class _NoText:
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def fixed_text(self, token_id: int) -> str | None:
        return ""


class Canary:
    """One canary (a router.requests.run_host.RunHost). `on_end` is called exactly once."""

    def __init__(self, model: str, clock: Clock, timeout_s: float, on_end: Callable[[CanaryResult], None]) -> None:
        self._on_end = on_end
        self._was_refused = False
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        self._run = RequestRun(
            ValidRequest(
                request_id=CANARY_ID_PREFIX + secrets.token_hex(8),
                model=model,
                prompt=PROMPT,
                sampling=sampling,
                stop=(),
                block_hashes=(),
                block_tokens=1,
            ),
            OutputAssembler(_NoText(), PROMPT, (), frozenset()),
            Terms(priority=""),  # it never waits
            clock,
            self,
            migrations=0,
        )
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._run.cancel)

    def start(self, decode: Worker, prefill: Worker | None) -> None:
        self._run.lifecycle.admit()
        self._run.lifecycle.enqueue()
        self._run.start(decode, prefill)

    def cancel(self) -> None:
        """It ends as failed."""
        self._run.cancel()

    def refused(self, run: RequestRun, refusal: TandemError) -> None:
        self._was_refused = True
        run.cancel()

    def requeue(self, run: RequestRun, cause: TandemError, *, refused: bool) -> None:
        self._was_refused = refused
        run.cancel()

    def ended(self, run: RequestRun, error: TandemError | None) -> None:
        self._timer.cancel()
        if error is None:
            self._on_end(CanaryResult.PASSED)
        else:
            self._on_end(CanaryResult.REFUSED if self._was_refused else CanaryResult.FAILED)

    def sent(self, run: RequestRun, worker: Worker) -> None: ...

    def paced(self, run: RequestRun, seconds: float) -> None: ...

    def prefilled(self, run: RequestRun) -> None: ...

    def gaps(self, run: RequestRun, gaps_s: Sequence[float], now_s: float) -> None: ...

    def handed_off(self, run: RequestRun, attempt: Attempt, done: worker_pb2.HandoffDone) -> None: ...

    def moved(self, run: RequestRun, source: Worker) -> None: ...

    def move_failed(self, run: RequestRun, target: Worker) -> None: ...

    def handoff_failed(self, run: RequestRun, fault: HandoffFault) -> None: ...

    def blamed(self, run: RequestRun, worker_ids: Sequence[str]) -> None: ...
