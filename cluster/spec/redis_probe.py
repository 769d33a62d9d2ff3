"""Checks that Redis answers: before a start, in `tandem doctor` and for `tandem status`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tandem.errors import ConfigError
from tandem.rpc.redis_client import REDIS_ERRORS, answer, connect

TIMEOUT_S = 2.0


def check_redis(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Returns its version. Raises ConfigError for an invalid URL or no answer; the message contains no password."""
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run in an event loop
            return thread.submit(lambda: asyncio.run(_version(url, timeout_s))).result()
    except ValueError as error:
        raise ConfigError(
            f"redis.url: expected a redis://, rediss:// or unix:// URL, or one of redis+sentinel:// or "
            f"redis+cluster://: {error}",
            field="redis.url",
        ) from None
    except REDIS_ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".") or "no answer in time"
        raise ConfigError(
            f"redis.url: expected a Redis or Valkey at {without_password(url)}, got: {reason}; start it, correct the "
            "URL, or omit --redis-url to use the embedded server",
            field="redis.url",
        ) from None


async def _version(url: str, timeout_s: float) -> str:
    client = connect(url, timeout_s)
    try:
        info = await answer(client.info("server"), timeout_s)
    finally:
        await client.aclose()
    return str(info.get("redis_version", "unknown")) if isinstance(info, dict) else "unknown"


def without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
