"""Connections to Redis or Valkey, and the timeouts of their calls.

    redis://[user:password@]host:port[/db]                        one server; rediss:// for TLS, unix:///path
    redis+sentinel://[user:password@]host:port,host:port/service[/db]   the service's master, through its sentinels
    redis+cluster://[user:password@]host:port,host:port           a cluster, through some of its nodes

`rediss+sentinel` and `rediss+cluster` use TLS. Client options go into the query: `?ssl_ca_certs=/etc/ca.pem`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

# What calls raise while Redis is away. A cluster without nodes raises what is no RedisError.
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

Answer = TypeVar("Answer")


def connect(url: str, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> Redis:
    """A client that tries once and returns bytes. Raises ValueError for any other URL than those above.

    Wrap every call in `answer`, which alone limits its time: the client's own timeout uses asyncio.wait_for, which may
    lose a cancellation in Python 3.11.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": connect_timeout_s,
    }
    match parts.scheme:
        case "redis+sentinel" | "rediss+sentinel":
            return _by_sentinels(parts, options)
        case "redis+cluster" | "rediss+cluster":
            return _cluster(parts, options)
        case _:
            return Redis.from_url(url, **options)


async def answer(call: Awaitable[Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """Awaits a call. Raises TimeoutError (an OSError), and any error of the client."""
    async with asyncio.timeout(timeout_s):
        return await call


def _by_sentinels(parts: SplitResult, options: dict[str, Any]) -> Redis:
    """Each new connection asks the sentinels for the master. A connection to a former master ends at its first
    refusal."""
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("expected /service after the sentinels")
    options |= _given(parts, db)
    asking = {name: value for name, value in options.items() if name.startswith(("ssl", "retry", "socket_connect"))}
    asking["socket_timeout"] = CONNECT_TIMEOUT_S
    sentinels = Sentinel(_nodes(parts, SENTINEL_PORT), sentinel_kwargs=asking, **options)  # type: ignore[no-untyped-call]
    return cast(Redis, sentinels.master_for(unquote(service)))


def _cluster(parts: SplitResult, options: dict[str, Any]) -> Redis:
    """A client of a Redis Cluster. It works like a single server's, because all keys of one call share a hash tag."""
    nodes = [ClusterNode(host, port) for host, port in _nodes(parts, DEFAULT_PORT)]
    return cast(Redis, RedisCluster(startup_nodes=nodes, **options, **_given(parts)))


def _nodes(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """Parses `host:port,host:port`, with IPv6 addresses in brackets. Raises ValueError."""
    nodes = [urlsplit(f"//{each}") for each in parts.netloc.rpartition("@")[2].split(",")]
    if not all(node.hostname for node in nodes):
        raise ValueError("expected host:port,host:port")
    return [(node.hostname or "", node.port or default_port) for node in nodes]


def _given(parts: SplitResult, db: str = "") -> dict[str, Any]:
    """User, database and query of a URL as client options. Raises ValueError."""
    user, at, _ = parts.netloc.rpartition("@")
    scheme = parts.scheme.partition("+")[0]
    found: dict[str, Any] = dict(parse_url(f"{scheme}://{user}{at}server/{db}?{parts.query}"))
    del found["host"]
    if found.pop("connection_class", None) is not None:
        found["ssl"] = True
    return found
