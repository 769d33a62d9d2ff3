"""Publishes what this worker caches to the prefix index: events on a Redis stream, and a snapshot beside it.

The index is advisory: Redis may be slow, down or empty at any time without effect on the caller. Events that could not
be appended are dropped; after a failure the publisher first writes a whole snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from redis.asyncio import Redis

from tandem.backoff import Backoff
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash
from tandem.kvcache.prefix_events import (
    EVENT_FIELD,
    MAX_EVENT_HASHES,
    SNAPSHOT_HEADER_BYTES,
    PrefixEvent,
    PrefixSnapshot,
    encode_event,
    encode_snapshot,
    entry_id,
    join_hashes,
    snapshot_key,
    split_hashes,
    stream_key,
    wanted_key,
)
from tandem.rpc.redis_client import REDIS_ERRORS, answer, connect

log = logging.getLogger(__name__)

STREAM_ENTRIES = 4096  # a reader further behind than this loads the snapshot
HEARTBEAT_S = 2.0  # between checks of what Redis holds
KEY_TTL_S = 3600  # the keys of a worker that never comes back expire after this
BATCH_EVENTS = 256
FRESH_STEP = 1 << 32


class EventPublisher:
    """One per worker epoch. `publish` may be called at any rate, also before `run`. No `redis_url`: no events."""

    def __init__(
        self,
        *,
        cluster: str,
        worker_id: str,
        epoch: int,
        redis_url: str | None,
        stream_entries: int = STREAM_ENTRIES,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._redis = None if redis_url is None else connect(redis_url)
        self._stream = stream_key(cluster, worker_id)
        self._snapshot = snapshot_key(cluster, worker_id)
        self._wanted = wanted_key(cluster, worker_id)
        self._epoch = epoch
        self._seq = 0
        self._stream_entries = stream_entries
        self._heartbeat_s = heartbeat_s
        self._hashes: set[BlockHash] = set()
        self._pending: deque[PrefixEvent] = deque()
        self._snapshot_due = True
        self._events_since_snapshot = 0
        self._header: bytes | None = None  # of the snapshot that Redis should hold
        self._last_entry: bytes | None = None  # the id with which the stream should end; None: an empty stream
        self._check_due_s = 0.0
        self._wake = asyncio.Event()

    def publish(self, stored: bool, hashes: bytes) -> None:
        """Notes that blocks (their hashes, concatenated) were stored or removed. Never waits, and never raises because
        of Redis."""
        if self._redis is None:
            return
        for start in range(0, len(hashes), MAX_EVENT_HASHES * HASH_BYTES):
            part = hashes[start : start + MAX_EVENT_HASHES * HASH_BYTES]
            if stored:
                self._hashes.update(split_hashes(part))
            else:
                self._hashes.difference_update(split_hashes(part))
            self._seq += 1
            if not self._snapshot_due:  # else the pending snapshot covers it
                self._pending.append(PrefixEvent(self._epoch, self._seq, stored, part))
        if len(self._pending) > self._stream_entries:
            self._need_snapshot()
        self._wake.set()

    async def run(self) -> None:
        """Publishes until cancelled; then removes this worker's keys if Redis is reachable."""
        if self._redis is None:
            return
        try:
            await self._publish_forever(self._redis)
        finally:
            try:
                async with asyncio.timeout(1.0):
                    await self._redis.delete(self._stream, self._snapshot, self._wanted)
            except REDIS_ERRORS:
                pass  # the keys expire on their own
            await self._redis.aclose()

    async def _publish_forever(self, redis: Redis) -> None:
        backoff = Backoff(first_s=0.1, most_s=5.0)
        reachable = True
        while True:
            try:
                await self._flush(redis)
                if not reachable:
                    log.info("redis is reachable again")
                reachable = True
                backoff.reset()
                await self._idle(redis)
            except REDIS_ERRORS as error:
                if reachable:
                    log.warning("redis is not reachable; a snapshot follows when it is", extra={"error": str(error)})
                reachable = False
                self._need_snapshot()
                await backoff.wait()

    async def _idle(self, redis: Redis) -> None:
        """Waits for work. Checks Redis once per heartbeat, also under constant work."""
        wait_s = self._check_due_s - asyncio.get_running_loop().time()
        if wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            else:
                self._wake.clear()
                return
        await self._check(redis)

    async def _check(self, redis: Redis) -> None:
        """Renews the keys' expiry, and detects a Redis that lost or reverted them."""
        async with redis.pipeline(transaction=False) as pipe:
            pipe.expire(self._stream, KEY_TTL_S)
            pipe.expire(self._snapshot, KEY_TTL_S)
            pipe.getrange(self._snapshot, 0, SNAPSHOT_HEADER_BYTES - 1)
            pipe.xrevrange(self._stream, count=1)
            pipe.delete(self._wanted)
            _, _, header, entries, wanted = await answer(pipe.execute())
        if header != self._header or (entries[0][0] if entries else None) != self._last_entry:
            log.warning("redis lost or reverted the prefix events; writing a snapshot")
            self._need_snapshot()
        elif wanted:
            # An empty event gives the snapshot a new number, so the router can tell it from the one it has.
            self._seq += 1
            self._pending.append(PrefixEvent(self._epoch, self._seq, True, b""))
            while self._pending:
                await self._append(redis)
            await self._write_snapshot(redis, fresh_stream=False)
        self._check_due_s = asyncio.get_running_loop().time() + self._heartbeat_s

    async def _flush(self, redis: Redis) -> None:
        while self._snapshot_due or self._pending:
            if self._snapshot_due:
                await self._write_snapshot(redis, fresh_stream=True)
            elif self._events_since_snapshot >= self._stream_entries // 2:
                await self._append(redis)
                await self._write_snapshot(redis, fresh_stream=False)
            else:
                await self._append(redis)

    async def _append(self, redis: Redis) -> None:
        batch = [self._pending.popleft() for _ in range(min(BATCH_EVENTS, len(self._pending)))]
        async with redis.pipeline(transaction=False) as pipe:
            for event in batch:
                pipe.xadd(
                    self._stream,
                    {EVENT_FIELD: encode_event(event)},
                    id=entry_id(event.epoch, event.seq),
                    maxlen=self._stream_entries,
                    approximate=True,
                )
            pipe.expire(self._stream, KEY_TTL_S)
            await answer(pipe.execute())
        self._events_since_snapshot += len(batch)
        self._last_entry = entry_id(self._epoch, batch[-1].seq).encode()

    async def _write_snapshot(self, redis: Redis, *, fresh_stream: bool) -> None:
        """`fresh_stream`: restart the stream, which may hold another epoch's events or have a gap."""
        if fresh_stream:
            # Beyond any number published before, so every reader of the old stream sees that it is behind.
            self._seq += FRESH_STEP
            self._pending.clear()
            self._snapshot_due = False
        self._events_since_snapshot = 0
        value = encode_snapshot(PrefixSnapshot(self._epoch, self._seq, join_hashes(self._hashes)))
        async with redis.pipeline(transaction=True) as pipe:
            if fresh_stream:
                pipe.delete(self._stream)
            pipe.set(self._snapshot, value, ex=KEY_TTL_S)
            await answer(pipe.execute())
        self._header = value[:SNAPSHOT_HEADER_BYTES]
        if fresh_stream:
            self._last_entry = None

    def _need_snapshot(self) -> None:
        self._snapshot_due = True
        self._pending.clear()
