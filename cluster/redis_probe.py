"""Is a Redis there? Asked before a start, by `tandem doctor` and for `tandem status`."""

from __future__ import annotations

from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tandem.errors import ConfigError

TIMEOUT_S = 2.0


def check_redis(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Its version. Raises ConfigError when the URL is none or nothing answers there; passwords are not shown."""
    try:
        client = Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise ConfigError(
            f"redis.url: expected a redis://, rediss:// or unix:// URL: {error}", field="redis.url"
        ) from None
    try:
        info = client.info("server")
    except (RedisError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"redis.url: expected a Redis or Valkey at {without_password(url)}, got: {reason}; start it, correct the "
            "URL, or leave --redis-url out for the embedded one",
            field="redis.url",
        ) from None
    finally:
        client.close()
    return str(info.get("redis_version", "unknown")) if isinstance(info, dict) else "unknown"


def without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
