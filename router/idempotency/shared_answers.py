"""Answers by idempotency key across the routers of a cluster, through Redis.

The router that sets a key first owns it and runs the request. It renews the key's lease until it writes the done
answer. Another router waits for that answer, or owns the key itself once the lease has ended. Values carry a MAC of the
cluster's secret, so no other user of Redis can forge an answer. Without Redis a router runs the request itself; where
Redis is slow, it does so while its claim is under way, and stops again if the key turns out to be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable
from enum import StrEnum
from typing import Any, TypeVar, cast

import msgspec

from router.idempotency.answer_log import AnswerLog, Head
from router.idempotency.keyed_answers import HEADER, KeyedRequest, Produce, is_final, key_reused, not_kept
from tandem.clock import Clock
from tandem.errors import AnswerUnderWay, TandemError, error_from_code
from tandem.rpc.redis_client import REDIS_ERRORS, answer, connect

log = logging.getLogger(__name__)

MAX_SHARED_BYTES = 1 << 20  # of one answer
LEASE_S = 5.0
POLL_S = 0.2
CLAIM_S = 0.1  # so long a request waits for Redis before it runs
LOOP_TURNS = 4  # after that, in which an answer that has arrived is read
ANSWER_S = 0.5
REST_S = 5.0  # without Redis, after it has failed
_MAC_BYTES = 32

Answer = TypeVar("Answer")


Asking = asyncio.Task[bool]
"""Redis's answer to a claim: whether the key is ours."""


class _TakenError(Exception):
    """Another router has the key."""


class _State(StrEnum):
    RUNNING = "running"
    DONE = "done"
    NOT_KEPT = "not_kept"


class _Shared(msgspec.Struct, frozen=True):
    """The value of a key. `error`: code, message and field of a failure without a head."""

    state: _State
    owner: str
    fingerprint: bytes
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] | None = None
    chunks: list[bytes] = []
    error: tuple[str, str, str | None] | None = None


class SharedAnswers:
    """Args: `secret`: the same for all routers of the cluster. `keep_s`: how long an answer stays in Redis."""

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        router_id: str,
        secret: str,
        keep_s: float,
        clock: Clock,
        *,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        claim_s: float = CLAIM_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._redis = connect(redis_url)
        self._cluster = cluster
        self._router_id = router_id
        self._secret = secret.encode()
        self._keep_ms = max(1, round(keep_s * 1000))
        self._clock = clock
        self._lease_ms = round(lease_s * 1000)
        self._poll_s = poll_s
        self._claim_s = claim_s
        self._answer_s = answer_s
        self._rests_until_s = clock.now_s()
        self._ends: set[asyncio.Task[None]] = set()  # of runs that ended before Redis answered

    async def obtain(self, request: KeyedRequest, log: AnswerLog, produce: Produce) -> TandemError | None:
        """Raises as `produce`; IdempotencyKeyReused, AnswerNotKept; AnswerUnderWay if another router runs it for too
        long."""
        key = f"tandem:{{{self._cluster}}}:idempotency:{request.identity.hex()}"
        owner = f"{self._router_id}:{secrets.token_hex(8)}"
        claim = self._sealed(key, _Shared(_State.RUNNING, owner, request.fingerprint))
        wait_until_s = self._clock.now_s() + request.wait_s
        is_elsewhere = False
        while True:
            value: bytes | None = None
            try:
                asking = self._asking(key, claim)
                if await self._may_run(asking, None if is_elsewhere else self._claim_s):
                    return await self._own(key, claim, asking, owner, request, log, produce)
                is_elsewhere = True
                value = await self._value(key)
            except _TakenError:
                is_elsewhere = True
                continue
            except REDIS_ERRORS:
                if not is_elsewhere:
                    return await produce(log)
            found = None if value is None else self._opened(key, value)
            if value is not None and found is None:
                return await produce(log)  # forged, or of routers with another secret
            if found is not None:
                if found.fingerprint != request.fingerprint:
                    raise key_reused()
                if found.state is not _State.RUNNING:
                    _replay(found, log)
                    return None
            if self._clock.now_s() >= wait_until_s:
                raise AnswerUnderWay(
                    f"{HEADER}: another router runs the request with this key; retry for its answer",
                    field=HEADER,
                    retry_after_s=1.0,
                )
            await asyncio.sleep(self._poll_s)

    def _asking(self, key: str, claim: bytes) -> Asking:
        async def ask() -> bool:
            return bool(await self._ask(self._redis.set(key, claim, nx=True, px=self._lease_ms)))

        asking = asyncio.create_task(ask(), name="idempotency-claim")
        # A request that ends meanwhile does not wait for it: asyncio would warn of its error.
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return asking

    async def _may_run(self, asking: Asking, wait_s: float | None) -> bool:
        """True also while Redis has not answered in time."""
        try:
            await asyncio.wait({asking}, timeout=wait_s)
            for _ in range(0 if asking.done() else LOOP_TURNS):  # it was perhaps this process that stood still
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        return not asking.done() or asking.result()

    async def close(self) -> None:
        for task in self._ends:
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        await self._redis.aclose()

    async def _own(
        self,
        key: str,
        claim: bytes,
        asking: Asking,
        owner: str,
        request: KeyedRequest,
        log: AnswerLog,
        produce: Produce,
    ) -> TandemError | None:
        """Raises _TakenError if the claim fails late, and nothing has been said."""
        renewal = asyncio.create_task(self._renew(key, claim), name="idempotency-lease")
        running = asyncio.ensure_future(produce(log))
        end: _Shared | None = None
        is_taken = False
        try:
            while not running.done():
                waits: set[asyncio.Future[Any]] = {running} if asking.done() else {running, asking}
                await asyncio.wait(waits, return_when=FIRST_COMPLETED)
                if is_taken := not running.done() and _is_refused(asking) and log.head is None and not log.chunks:
                    raise _TakenError
            failure = running.result()
            if failure is None or is_final(failure):
                end = _done(owner, request, log)
            return failure
        except TandemError as error:
            if is_final(error):
                said = (error.code.value, error.message, error.field)
                end = _Shared(_State.DONE, owner, request.fingerprint, error=said)
            raise
        finally:
            renewal.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if not is_taken:
                await self._end(key, claim, asking, end)

    async def _end(self, key: str, claim: bytes, asking: Asking, end: _Shared | None) -> None:
        """Of the run. Its clients do not wait for a Redis that has not answered yet."""
        if asking.done():
            await self._write_end(key, claim, end)
            return

        async def later() -> None:
            await asyncio.wait({asking})
            await self._write_end(key, claim, end)

        task = asyncio.create_task(later(), name="idempotency-end")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _write_end(self, key: str, claim: bytes, end: _Shared | None) -> None:
        with contextlib.suppress(*REDIS_ERRORS):  # then the lease ends by itself
            if await self._value(key) == claim:
                if end is None:
                    await self._ask(self._redis.delete(key))
                else:
                    await self._ask(self._redis.set(key, self._sealed(key, end), px=self._keep_ms))

    async def _renew(self, key: str, claim: bytes) -> None:
        """Until another router owns the key. Scripts are not allowed everywhere, and none is needed: at worst another
        owner's lease is renewed once."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            with contextlib.suppress(*REDIS_ERRORS):
                value = await self._value(key)
                if value is None:
                    await self._ask(self._redis.set(key, claim, nx=True, px=self._lease_ms))
                elif value == claim:
                    await self._ask(self._redis.pexpire(key, self._lease_ms))
                else:
                    log.warning("an idempotency lease was lost; the request may run on two routers")
                    return

    async def _value(self, key: str) -> bytes | None:
        return cast(bytes | None, await self._ask(self._redis.get(key)))  # undecoded, as `connect` makes its clients

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        """Raises at once while Redis rests."""
        if self._clock.now_s() < self._rests_until_s:
            if asyncio.iscoroutine(call):
                call.close()
            raise TimeoutError("Redis failed a moment ago")
        try:
            return await answer(call, self._answer_s)
        except REDIS_ERRORS as error:
            self._rests_until_s = self._clock.now_s() + REST_S
            log.warning("redis is not reachable; idempotency keys hold per router", extra={"error": str(error)})
            raise

    def _sealed(self, key: str, shared: _Shared) -> bytes:
        content = msgspec.msgpack.encode(shared)
        return self._mac(key, content) + content

    def _opened(self, key: str, value: bytes) -> _Shared | None:
        """None if a router of this cluster did not write it."""
        mac, content = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            log.warning("an idempotency key in Redis has a value of another origin; ignored")
            return None
        return msgspec.msgpack.decode(content, type=_Shared)

    def _mac(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, b"tandem.idempotency.v1" + key.encode() + b"\0" + content, "sha256")


def _is_refused(asking: Asking) -> bool:
    return asking.done() and not asking.cancelled() and asking.exception() is None and not asking.result()


def _done(owner: str, request: KeyedRequest, log: AnswerLog) -> _Shared:
    if not log.is_kept or log.kept_bytes > MAX_SHARED_BYTES:
        return _Shared(_State.NOT_KEPT, owner, request.fingerprint)
    status, headers = (0, None) if log.head is None else (log.head.status, log.head.headers)
    return _Shared(_State.DONE, owner, request.fingerprint, status, headers, list(log.chunks))


def _replay(found: _Shared, log: AnswerLog) -> None:
    """Raises AnswerNotKept, and the failure that the answer is."""
    if found.state is _State.NOT_KEPT:
        raise not_kept()
    log.is_replayed = True
    if found.error is not None:
        raise error_from_code(*found.error)
    if found.headers is not None:
        log.head = Head(found.status, found.headers)
    for chunk in found.chunks:
        log.append(chunk)
