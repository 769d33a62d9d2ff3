"""Keeps the prefix mirror in step with Redis: loads snapshots, follows every worker's stream.

Which workers there are comes from the directory, not from Redis. While Redis is away the mirror stays as it was, and
after MAX_STALE_S it is emptied; requests never notice more than fewer cache hits. No other
module of the router speaks to Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import KeyT, StreamIdT

from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from tandem.clock import Clock
from tandem.prefix_events import (
    EVENT_FIELD,
    PrefixEventError,
    decode_event,
    decode_snapshot,
    entry_id,
    snapshot_key,
    stream_key,
)

log = logging.getLogger(__name__)

MAX_STALE_S = 60.0
BLOCK_MS = 1000
SNAPSHOT_POLL_S = 0.25  # between looks at a worker whose snapshot is not there yet
READ_ENTRIES = 512
MAX_BACKOFF_S = 5.0

StreamReply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]


class PrefixFollower:
    def __init__(self, redis_url: str, cluster: str, mirror: PrefixMirror, clock: Clock) -> None:
        self._redis = Redis.from_url(
            redis_url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, socket_connect_timeout=2.0
        )
        self._cluster = cluster
        self._mirror = mirror
        self._clock = clock
        self._workers: frozenset[WorkerKey] = frozenset()
        self._resync: set[WorkerKey] = set()  # followed workers that need a snapshot
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_at_s: float | None = None

    @property
    def connected(self) -> bool:
        return self._lost_at_s is None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix-follower")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.aclose()

    def set_workers(self, workers: Iterable[WorkerKey]) -> None:
        """The worker lives of the directory. What is known of any other is dropped at once."""
        wanted = frozenset(workers)
        if wanted == self._workers:
            return
        for gone in self._mirror.workers() - wanted:
            self._mirror.drop(gone)
        self._resync = (self._resync & wanted) | (wanted - self._workers)
        self._workers = wanted
        self._changed.set()

    async def _run(self) -> None:
        backoff_s = 0.1
        while True:
            try:
                await self._follow_once()
                if self._lost_at_s is not None:
                    log.info("redis is back")
                self._lost_at_s = None
                backoff_s = 0.1
            except Exception as error:  # whatever Redis or its client does costs cache hits, never the router
                if not isinstance(error, RedisError | OSError):
                    log.exception("following the prefix events failed")
                self._on_lost(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _on_lost(self, error: Exception) -> None:
        now_s = self._clock.now_s()
        if self._lost_at_s is None:
            log.warning("redis is not reachable; the prefix index is frozen", extra={"error": str(error)})
            self._lost_at_s = now_s
        self._resync = set(self._workers)  # it may come back empty, or without the events in between
        if now_s - self._lost_at_s > MAX_STALE_S:
            for worker in self._mirror.workers():
                self._mirror.drop(worker)

    async def _follow_once(self) -> None:
        if self._resync:
            await self._load_snapshots()
        following = {
            stream_key(self._cluster, worker.worker_id): worker
            for worker in self._workers
            if worker not in self._resync and self._mirror.seq(worker) is not None
        }
        if not following:
            await self._redis.ping()
            await self._wait_for_change(SNAPSHOT_POLL_S if self._resync else BLOCK_MS / 1000)
            return
        positions: dict[KeyT, StreamIdT] = {
            key: entry_id(worker.epoch, self._mirror.seq(worker) or 0) for key, worker in following.items()
        }
        block_ms = round(SNAPSHOT_POLL_S * 1000) if self._resync else BLOCK_MS
        # redis-py types the replies of all its protocols and decoders at once; protocol 2 undecoded is this one.
        reply = cast(StreamReply | None, await self._redis.xread(positions, count=READ_ENTRIES, block=block_ms))
        for key, entries in reply or []:
            self._apply(following[key.decode()], entries)

    def _apply(self, worker: WorkerKey, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if worker not in self._workers:
            return  # left while we were reading
        for entry, fields in entries:
            try:
                outcome = self._mirror.apply(worker, decode_event(entry.decode(), fields.get(EVENT_FIELD, b"")))
            except PrefixEventError as error:
                log.warning("bad prefix event", extra={"worker": worker.worker_id, "error": str(error)})
                outcome = Applied.GAP
            if outcome in (Applied.GAP, Applied.OTHER_EPOCH):
                self._mirror.drop(worker)
                self._resync.add(worker)
                return

    async def _load_snapshots(self) -> None:
        wanted = sorted(self._resync, key=lambda worker: worker.worker_id)
        values = await self._redis.mget([snapshot_key(self._cluster, worker.worker_id) for worker in wanted])
        for worker, value in zip(wanted, values, strict=True):
            if value is None or worker not in self._workers:
                continue
            try:
                snapshot = decode_snapshot(cast(bytes, value))
            except PrefixEventError as error:
                log.warning("bad prefix snapshot", extra={"worker": worker.worker_id, "error": str(error)})
                continue
            if snapshot.epoch == worker.epoch:  # else: of an earlier life; the new one writes its own soon
                self._mirror.load(worker.worker_id, snapshot)
                self._resync.discard(worker)

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
