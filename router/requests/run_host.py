"""What a request on its way asks of the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvtransfer.causes import HandoffFault
from router.observe.trace import Attempt
from tandem.errors import TandemError
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.requests.run import RequestRun
    from router.workers.fleet import Worker


class RunHost(Protocol):
    def sent(self, run: RequestRun, worker: Worker) -> None:
        """The frame that gives the worker its part of the request went out."""

    def refused(self, run: RequestRun, refusal: TandemError) -> None:
        """The decode worker cannot take it now: choose another, or queue it again."""

    def requeue(self, run: RequestRun, cause: TandemError, *, refused: bool) -> None:
        """Its attempt failed or was refused, and it goes back in line."""

    def prefilled(self, run: RequestRun) -> None:
        """Its prompt (and answer so far) is computed: the prefill worker has room again."""

    def paced(self, run: RequestRun, seconds: float) -> None:
        """Its last PACE_TOKENS tokens in the decode batch took so long."""

    def gaps(self, run: RequestRun, gaps_s: Sequence[float], now_s: float) -> None:
        """Tokens of the answer came, each so long after the one before it."""

    def handed_off(self, run: RequestRun, attempt: Attempt, done: worker_pb2.HandoffDone) -> None:
        """A worker reported its side of a handoff; the prefill worker perhaps after the request's end."""

    def blamed(self, run: RequestRun, worker_ids: Sequence[str]) -> None:
        """An attempt failed, and these workers may be at fault."""

    def moved(self, run: RequestRun, source: Worker) -> None:
        """It decodes on `run.decode` now, and no longer on `source`."""

    def move_failed(self, run: RequestRun, target: Worker) -> None:
        """It goes on where it was."""

    def handoff_failed(self, run: RequestRun, fault: HandoffFault) -> None: ...

    def ended(self, run: RequestRun, error: TandemError | None) -> None:
        """It reached its end state."""
