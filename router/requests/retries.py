"""What follows from the error of an attempt: another attempt (at most `router.max_migrations`), or the request's end.
And which errors blame a worker.

Another attempt comes first in the queue, at once; after a refusal, `request_queue.REFUSED_HOLD_S` later.
`requests.placer` chooses its worker, if possible one that did not fail it. A request whose workers die is ended
(`requests.deaths`).
"""

from __future__ import annotations

from enum import StrEnum

from tandem.errors import ErrorCode
from tandem.request import RequestState

# The worker is well but cannot take the request now (no KV blocks, a transfer agent being replaced).
REFUSALS = frozenset({ErrorCode.KV_EXHAUSTED, ErrorCode.UNAVAILABLE})
HANDOFF_FAULTS = frozenset({ErrorCode.HANDOFF_FAILED, ErrorCode.DEADLINE_EXCEEDED})
BLAMED = HANDOFF_FAULTS | {ErrorCode.INTERNAL}  # the link itself reports a lost worker
RETRIED = HANDOFF_FAULTS | REFUSALS | {ErrorCode.WORKER_LOST, ErrorCode.WORKER_DIED}


class Retry(StrEnum):
    WHEN_THERE_IS_ROOM = "when_there_is_room"  # does not count: it may try as long as it may wait
    MIGRATE = "migrate"  # counts as one of the request's migrations
    NO = "no"


def retry_of(code: ErrorCode, state: RequestState, migrations: int, max_migrations: int) -> Retry:
    """Of a request in `state` whose attempt ended with `code`, after so many migrations. A request whose answer is
    complete finishes instead (`RequestRun`); losing a prefill worker after the handoff is no error at all."""
    if code in REFUSALS and state in (RequestState.QUEUED, RequestState.PREFILLING):
        return Retry.WHEN_THERE_IS_ROOM
    return Retry.MIGRATE if code in RETRIED and migrations < max_migrations else Retry.NO
