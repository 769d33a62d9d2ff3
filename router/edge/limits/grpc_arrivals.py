"""The wait of gRPC calls for their messages. The library shows a message only when all of it has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from router.auth.grpc_gate import call_of, source_of
from router.auth.principal import ANONYMOUS
from router.edge.limits.bodies import EXEMPT_BYTES, LARGEST_BODIES, BodyBudget
from router.edge.limits.grpc_calls import CallLimit
from tandem.errors import DeadlineExceeded, InputError, OverloadedError, TandemError

SLOW_AFTER_S = 0.25  # a message of 4 MiB takes 35 ms at 1 Gbit/s
MAX_SLOW = LARGEST_BODIES // 2  # the other half of the budget is left to HTTP


class MessageBudget:
    """Bills each message that arrives slowly as one of the largest size, whose first part a client may have sent."""

    def __init__(self, bodies: BodyBudget, max_message_bytes: int) -> None:
        self._bodies = bodies
        self._message_bytes = max(0, max_message_bytes - EXEMPT_BYTES)
        self._slow = CallLimit(MAX_SLOW, MAX_SLOW // 2, "messages that arrive slowly")

    def take(self, caller: str) -> None:
        """Raises OverloadedError."""
        self._slow.enter(caller)
        try:
            self._bodies.take(caller, self._message_bytes)
        except OverloadedError:
            self._slow.leave(caller)
            raise

    def give_back(self, caller: str) -> None:
        self._slow.leave(caller)
        self._bodies.give_back(caller, self._message_bytes)


@dataclass(eq=False, slots=True)
class _Wait:
    """Of one call. `error`: what its client is told if the wait ends before the message."""

    caller: str
    error: TandemError
    timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    is_billed: bool = False

    def end(self, error: TandemError) -> None:
        self.error = error
        self.timeout.reschedule(0)  # in the past: at once


class Arrivals:
    """The calls that wait for their one message, from their headers on.

    Args:
        max_waiting: beyond it the longest wait ends, so calls that send nothing displace only each other.
        timeout_s: of one message. `setting`: what sets it.
        budget: for messages that are slow; None: they are not billed.
    """

    def __init__(
        self, max_waiting: int, timeout_s: float, *, setting: str | None = None, budget: MessageBudget | None = None
    ) -> None:
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._late = f"message: expected within {timeout_s:g} s of the call" + (f" ({setting})" if setting else "")
        self._budget = budget
        self._waits: dict[_Wait, None] = {}

    async def message(self, context: Any) -> bytes:
        """Raises OverloadedError, DeadlineExceeded; InputError if the client ends the call without a message."""
        wait = _Wait(caller_of(context), DeadlineExceeded(self._late))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(min(SLOW_AFTER_S, self._timeout_s), self._is_slow, wait, loop.time() + self._timeout_s)
        try:
            async with wait.timeout:
                self._add(wait)
                data = await context.read()
        except TimeoutError:
            raise wait.error from None
        finally:
            timer.cancel()
            self._waits.pop(wait, None)
            if wait.is_billed and self._budget is not None:
                self._budget.give_back(wait.caller)
        if data is grpc.aio.EOF:
            raise InputError("message: expected one, got none")
        return bytes(data)

    def _add(self, wait: _Wait) -> None:
        self._waits[wait] = None
        if len(self._waits) > self._max_waiting:
            oldest = next(iter(self._waits))
            del self._waits[oldest]
            text = f"message: at most {self._max_waiting} calls may wait for theirs; send it with the call"
            oldest.end(OverloadedError(text, retry_after_s=1.0))

    def _is_slow(self, wait: _Wait, until_s: float) -> None:
        wait.timeout.reschedule(until_s)
        try:
            if self._budget is not None:
                self._budget.take(wait.caller)
                wait.is_billed = True
        except OverloadedError as error:
            wait.end(error)


async def messages(context: Any, idle_s: float) -> AsyncIterator[bytes]:
    """The messages of a stream. Raises DeadlineExceeded if the next one takes longer than `idle_s`."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                data = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"stream: expected a message at least every {idle_s:g} s") from None
        if data is grpc.aio.EOF:
            return
        yield data


def caller_of(context: Any) -> str:
    """The key of a call; of one without a key the client's address."""
    call = call_of(context)
    return source_of(context) if call is None or call.principal is ANONYMOUS else call.principal.key_id
