"""How Tandem connects to Redis or Valkey, and how long it waits for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0

Answer = TypeVar("Answer")


def connect(url: str) -> Redis:
    """A client that tries once; replies are bytes. Every call belongs inside `answer`, the only limit on its time:
    the client's own uses asyncio.wait_for, which may lose a cancellation in Python 3.11."""
    return Redis.from_url(
        url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=CONNECT_TIMEOUT_S
    )


async def answer(call: Awaitable[Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """Raises TimeoutError (an OSError), and whatever the client raises."""
    async with asyncio.timeout(timeout_s):
        return await call
