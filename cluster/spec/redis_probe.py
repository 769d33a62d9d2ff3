"""Is a Redis there? Asked before a start, by `tandem doctor` and for `tandem status`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from tandem.errors import ConfigError
from tandem.rpc.redis_client import answer, connect

TIMEOUT_S = 2.0


def check_redis(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Its version. Raises ConfigError when the URL is none or nothing answers there; passwords are not shown."""
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop already
            return thread.submit(lambda: asyncio.run(_version(url, timeout_s))).result()
    except ValueError as error:
        raise ConfigError(
            f"redis.url: expected a redis://, rediss:// or unix:// URL, or one of redis+sentinel:// or "
            f"redis+cluster://: {error}",
            field="redis.url",
        ) from None
    except (RedisError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or "no answer in time"
        raise ConfigError(
            f"redis.url: expected a Redis or Valkey at {without_password(url)}, got: {reason}; start it, correct the "
            "URL, or leave --redis-url out for the embedded one",
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
