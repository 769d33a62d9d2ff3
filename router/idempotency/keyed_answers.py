"""The answers of one router by idempotency key, under way and done, and the tasks that write them.

A request with a key runs in a task of its own. While clients read, it runs; when the last one is gone it goes on for
`grace_s`, so that a repeat finds it. A done answer stays for `keep_s`, or until others need its memory: then the tenant
that holds most gives up its least recently used one. A failure after which a retry may succeed is not kept: the key is
free again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from router.idempotency.answer_log import AnswerLog, LogReader
from router.idempotency.keyed_metrics import Api, Outcome
from router.idempotency.tenant_shares import TenantShares
from tandem.config.router import IdempotencySpec
from tandem.errors import (
    AnswerNotKept,
    AnswerUnderWay,
    ErrorCode,
    IdempotencyKeyReused,
    InternalError,
    OverloadedError,
    RequestCancelled,
    TandemError,
    UnavailableError,
)

log = logging.getLogger(__name__)

HEADER = "idempotency-key"
MAX_TOTAL_BYTES = 64 << 20  # of all answers that are kept
MAX_KEYS = 10_000
STOP_S = 1.0  # for runs to write their ends

# Another priority, which fingerprints leave out, may be permitted.
_FREEING = (ErrorCode.CANCELLED, ErrorCode.IDEMPOTENCY_KEY_REUSED, ErrorCode.PERMISSION_DENIED)

# Writes an answer into a log. Returns the failure that the answer itself tells, or raises it.
Produce = Callable[[AnswerLog], Awaitable[TandemError | None]]
# Gets what a run raised, at its end.
OnEnd = Callable[[TandemError | None], None]


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """`identity`: of the tenant and its key. `fingerprint`: of what is asked. `wait_s`: how long it may wait for an
    answer of another router. `tenant`: whose share of the memory the answer takes."""

    identity: bytes
    fingerprint: bytes
    wait_s: float
    api: Api = Api.HTTP
    tenant: str = ""


class Routers(Protocol):
    """The other routers of the cluster."""

    async def obtain(self, request: KeyedRequest, log: AnswerLog, produce: Produce) -> TandemError | None:
        """Calls `produce`, or writes the answer of the router that has. Returns and raises as `produce`."""
        ...

    async def close(self) -> None: ...


def _alone(error: TandemError) -> TandemError:
    """Without what it arose from, whose frames hold the request: it is kept as long as its answer."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _nothing_more(raised: TandemError | None) -> None:
    """A run ends once."""


@dataclass(slots=True, eq=False)
class _Entry:
    request: KeyedRequest
    log: AnswerLog
    on_end: OnEnd
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None  # ends its run, or forgets its answer


class KeyedAnswers:
    """`others` None: the only router, or it shares nothing. `count` gets the outcome of every request."""

    def __init__(
        self,
        spec: IdempotencySpec,
        others: Routers | None = None,
        count: Callable[[Api, Outcome], None] = lambda api, outcome: None,
    ) -> None:
        self._spec = spec
        self._others = others
        self._count = count
        self._entries: dict[bytes, _Entry] = {}
        self._keys: TenantShares[_Entry] = TenantShares()  # how many; those of done requests can be given up
        self._memory: TenantShares[_Entry] = TenantShares()  # in bytes; done answers can be given up
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def kept_bytes(self) -> int:
        return self._memory.total

    def read(self, request: KeyedRequest, produce: Produce, on_end: OnEnd = lambda raised: None) -> LogReader:
        """A reader of the answer under way or done, else of the one that `produce` writes now. Only then it calls
        `on_end`.

        Raises IdempotencyKeyReused, AnswerNotKept, OverloadedError.
        """
        entry = self._entries.get(request.identity)
        is_repeat = entry is not None
        if entry is None:
            entry = self._begin(request, produce, on_end)
        elif entry.request.fingerprint != request.fingerprint:
            self._count(request.api, Outcome.CONFLICT)
            raise key_reused()
        elif not entry.log.is_kept:
            self._count(request.api, Outcome.NOT_KEPT)
            raise not_kept()
        elif entry.log.ended:
            self._keys.use(entry.request.tenant, request.identity)
            self._memory.use(entry.request.tenant, request.identity)
        elif entry.timer is not None:
            entry.timer.cancel()
        if is_repeat:
            self._count(request.api, Outcome.REPLAYED if entry.log.ended else Outcome.ATTACHED)
        reader = entry.log.reader(partial(self._left, entry))
        reader.is_repeat = is_repeat
        return reader

    async def close(self) -> None:
        """Call it when the router has ended its requests."""
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
        self._entries.clear()
        self._keys.clear()
        self._memory.clear()
        if self._others is not None:
            await self._others.close()

    def _begin(self, request: KeyedRequest, produce: Produce, on_end: OnEnd) -> _Entry:
        if self._is_closed:
            raise _stopped()
        if len(self._entries) >= MAX_KEYS:
            if (given_up := self._keys.give_up(request.tenant)) is None:
                text = f"{HEADER}: expected at most {MAX_KEYS} keys, and requests under way have too many; retry later"
                raise OverloadedError(text, field=HEADER, retry_after_s=1.0)
            self._remove(given_up)
        entry = self._entries[request.identity] = _Entry(request, AnswerLog(self, request.tenant), on_end)
        self._keys.take(request.tenant, 1)
        entry.task = asyncio.create_task(self._run(entry, produce), name="keyed-request")
        self._tasks.add(entry.task)
        entry.task.add_done_callback(self._tasks.discard)
        return entry

    async def _run(self, entry: _Entry, produce: Produce) -> None:
        failure: TandemError | None
        raised: TandemError | None = None
        has_run = False

        async def run(log: AnswerLog) -> TandemError | None:
            nonlocal has_run
            has_run = True
            self._count(entry.request.api, Outcome.RUN)
            return await produce(log)

        try:
            if self._others is None:
                failure = await run(entry.log)
            else:
                failure = await self._others.obtain(entry.request, entry.log, run)
        except TandemError as error:
            failure = raised = _alone(error)
        except asyncio.CancelledError:
            failure = raised = _stopped() if self._is_closed else RequestCancelled("no client waits for the answer")
        except Exception:
            log.exception("a request with an idempotency key failed")
            failure = raised = InternalError("internal error")
        if not has_run and (outcome := _outcome(entry.log, raised)) is not None:
            self._count(entry.request.api, outcome)
        entry.on_end(raised)
        entry.on_end = _nothing_more  # it holds the client's request
        entry.log.end(raised)
        entry.task = None
        self._ended(entry, is_kept=failure is None or is_final(failure))

    def _ended(self, entry: _Entry, *, is_kept: bool) -> None:
        identity, tenant = entry.request.identity, entry.request.tenant
        if self._entries.get(identity) is not entry:
            return  # it was abandoned
        if not is_kept:
            self._remove(entry)
            return
        if entry.timer is not None:
            entry.timer.cancel()
        self._keys.offer(tenant, identity, entry)
        if entry.log.is_kept:
            self._memory.offer(tenant, identity, entry)
        entry.timer = asyncio.get_running_loop().call_later(self._spec.keep_s, self._remove, entry)

    def _left(self, entry: _Entry) -> None:
        """A reader has closed."""
        if entry.task is not None and not entry.log.readers and not self._is_closed:
            entry.timer = asyncio.get_running_loop().call_later(self._spec.grace_s, self._abandon, entry)

    def _abandon(self, entry: _Entry) -> None:
        self._remove(entry)
        if entry.task is not None:
            entry.task.cancel()

    def _remove(self, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        identity, tenant = entry.request.identity, entry.request.tenant
        if self._entries.get(identity) is entry:
            del self._entries[identity]
            self._keys.give_back(tenant, 1)
            self._keys.withdraw(tenant, identity)
            self._memory.withdraw(tenant, identity)
            entry.log.forget()

    # ---- the logs' Memory

    def take(self, tenant: str, size_bytes: int) -> bool:
        """If others need to be forgotten, forgets their answers, but not their keys."""
        while self.kept_bytes + size_bytes > MAX_TOTAL_BYTES:
            if (given_up := self._memory.give_up(tenant)) is None:
                return False
            given_up.log.forget()
        self._memory.take(tenant, size_bytes)
        return True

    def give_back(self, tenant: str, size_bytes: int) -> None:
        self._memory.give_back(tenant, size_bytes)


def _outcome(log: AnswerLog, raised: TandemError | None) -> Outcome | None:
    """Of a request whose key another router has. None: its client left while it waited."""
    if log.is_replayed:
        return Outcome.REPLAYED
    refusals = {
        IdempotencyKeyReused: Outcome.CONFLICT,
        AnswerNotKept: Outcome.NOT_KEPT,
        AnswerUnderWay: Outcome.UNDER_WAY,
    }
    return refusals.get(type(raised)) if raised is not None else None


def is_final(failure: TandemError) -> bool:
    """Whether a repeat gets this failure again."""
    return not failure.wire.retryable and failure.code not in _FREEING


def key_reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        f"{HEADER}: expected the path and body that this key was first used with, got others: use a new key for "
        "another request",
        field=HEADER,
    )


def not_kept() -> AnswerNotKept:
    return AnswerNotKept(
        f"{HEADER}: the request with this key has run, but its answer was too large to be kept or others needed "
        "the memory: use a new key to run it again",
        field=HEADER,
    )


def _stopped() -> UnavailableError:
    return UnavailableError("the router stopped before the answer was complete; retry elsewhere", retry_after_s=1.0)
