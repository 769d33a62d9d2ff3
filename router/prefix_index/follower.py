"""Keeps the prefix mirror in step with Redis: loads snapshots, follows every worker's stream, and checks itself.

Which workers there are comes from the directory, not from Redis. No request waits for Redis, and no other module of the
router speaks to it. While Redis is away the mirror stays as it was; what nothing has confirmed for MAX_STALE_S is
forgotten. docs/routing.md says what recovers how.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from redis.exceptions import RedisError
from redis.typing import KeyT, StreamIdT

from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from tandem.clock import Clock
from tandem.kvcache.prefix_events import (
    EVENT_FIELD,
    MAX_SNAPSHOT_BYTES,
    SNAPSHOT_HEADER_BYTES,
    PrefixEvent,
    PrefixEventError,
    SnapshotHeader,
    decode_event,
    decode_snapshot,
    decode_snapshot_header,
    entry_id,
    snapshot_key,
    stream_key,
    wanted_key,
)
from tandem.rpc.redis_client import ANSWER_TIMEOUT_S, answer, connect

log = logging.getLogger(__name__)

MAX_STALE_S = 60.0
CHECK_S = 1.0  # between looks at the headers of the snapshots
SNAPSHOT_POLL_S = 0.25  # the same while a worker lacks its snapshot or seems to be behind
READ_PAUSE_S = 0.01  # events that come meanwhile are applied together, which costs hardly more than one
READ_ENTRIES = 512  # of each worker
APPLY_BYTES = 64 << 10  # at once: two milliseconds, then requests have their turn
FAR_EVENTS = 1 << 20  # a worker writes its snapshot anew long before it has said so much since
ASK_S = 5.0  # between requests for the same snapshot
# Together with the longest pause before another try: a Redis that is back is noticed within 5 s.
QUICK_ANSWER_S = 2.0  # for anything but whole snapshots
MAX_BACKOFF_S = 2.0

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class IndexFault(StrEnum):
    """Why what was known of a worker was thrown away, or what Redis holds of it could not be used."""

    GAP = "gap"  # events are missing
    OTHER_EPOCH = "other_epoch"  # an entry of another life in its stream
    MALFORMED = "malformed"  # an entry or a snapshot that nobody can read
    BEHIND = "behind"  # the snapshot is newer than what the stream led to
    AHEAD = "ahead"  # it led to events that the worker never wrote, or Redis went back
    UNCONFIRMED = "unconfirmed"  # Redis or the worker's keys were away for too long


@dataclass(slots=True)
class _Follow:
    """What is known of one worker life."""

    confirmed_at_s: float
    needs_seq: int | None = 0  # a snapshot up to at least this event is needed; None: it is followed
    suspect_seq: int | None = None  # where it stood when its snapshot was seen to be newer
    asked_at_s: float | None = None  # for a snapshot


class PrefixFollower:
    def __init__(
        self,
        redis_url: str,
        cluster: str,
        mirror: PrefixMirror,
        clock: Clock,
        *,
        answer_timeout_s: float = QUICK_ANSWER_S,
        check_s: float = CHECK_S,
        snapshot_poll_s: float = SNAPSHOT_POLL_S,
    ) -> None:
        self._redis = connect(redis_url)
        self._answer_timeout_s = answer_timeout_s
        self._check_s = check_s
        self._snapshot_poll_s = snapshot_poll_s
        self._cluster = cluster
        self._mirror = mirror
        self._clock = clock
        self._follows: dict[WorkerKey, _Follow] = {}
        self._check_due_s = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._faults: Counter[IndexFault] = Counter()
        self.connected = True  # False from the first failure to the next success

    @property
    def faults(self) -> Mapping[IndexFault, int]:
        return self._faults

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
        if wanted == self._follows.keys():
            return
        for gone in self._mirror.workers() - wanted:
            self._mirror.drop(gone)
        now_s = self._clock.now_s()
        self._follows = {worker: self._follows.get(worker) or _Follow(now_s) for worker in wanted}
        self._check_due_s = 0.0
        self._changed.set()

    async def _run(self) -> None:
        backoff_s = 0.1
        while True:
            try:
                await self._follow_once()
                if not self.connected:
                    log.info("redis is back")
                self.connected = True
                backoff_s = 0.1
            except Exception as error:  # whatever Redis or its client does costs cache hits, never the router
                if not isinstance(error, RedisError | OSError):
                    log.exception("following the prefix events failed")
                if self.connected:
                    log.warning("redis is not reachable; the prefix index is frozen", extra={"error": str(error)})
                self.connected = False
                self._check_due_s = 0.0  # it may come back empty, or older
                self._forget_unconfirmed()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _follow_once(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._check_due_s:
            await self._check()
            self._check_due_s = loop.time() + (self._check_s if self._settled() else self._snapshot_poll_s)
        wait_s = max(0.001, self._check_due_s - loop.time())
        following = {
            stream_key(self._cluster, worker.worker_id): worker
            for worker, follow in self._follows.items()
            if follow.needs_seq is None
        }
        if not following:
            await self._wait_for_change(wait_s)
            return
        positions: dict[KeyT, StreamIdT] = {
            key: entry_id(worker.epoch, self._mirror.seq(worker) or 0) for key, worker in following.items()
        }
        # redis-py types the replies of all its protocols and decoders at once; protocol 2 undecoded is this one.
        reply = cast(
            list[tuple[bytes, Entries]] | None,
            await answer(
                self._redis.xread(positions, count=READ_ENTRIES, block=max(1, round(wait_s * 1000))),
                wait_s + self._answer_timeout_s,
            ),
        )
        for key, entries in reply or []:
            for portion in _portions(entries):
                self._apply(following[key.decode()], portion)
                await asyncio.sleep(0)
        if reply:
            await asyncio.sleep(READ_PAUSE_S)

    def _apply(self, worker: WorkerKey, entries: Entries) -> None:
        follow = self._follows.get(worker)
        if follow is None or follow.needs_seq is not None:
            return  # left while we were reading, or distrusted for an entry before these
        events: list[PrefixEvent] = []
        bad: PrefixEventError | None = None
        for entry, fields in entries:
            try:
                events.append(decode_event(entry.decode(), fields.get(EVENT_FIELD, b"")))
            except PrefixEventError as error:
                bad = error
                break
        before = self._mirror.seq(worker) or 0
        match self._mirror.apply(worker, events):
            case Applied.GAP:
                self._distrust(worker, follow, IndexFault.GAP, before + 1)
            case Applied.OTHER_EPOCH:
                self._distrust(worker, follow, IndexFault.OTHER_EPOCH, before + 1)
            case Applied.OK if bad is not None:
                log.warning("bad prefix event", extra={"worker": worker.worker_id, "error": str(bad)})
                self._distrust(worker, follow, IndexFault.MALFORMED, (self._mirror.seq(worker) or 0) + 1)

    async def _check(self) -> None:
        """Compares every worker with the header of its snapshot, and loads the snapshots that are needed."""
        workers = list(self._follows)
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.getrange(snapshot_key(self._cluster, worker.worker_id), 0, SNAPSHOT_HEADER_BYTES - 1)
            values = cast(list[bytes], await answer(pipe.execute(), self._answer_timeout_s) if workers else [])
        for worker, value in zip(workers, values, strict=True):
            follow = self._follows.get(worker)
            header = self._header(worker, value) if value else None  # no key reads as empty
            if follow is None or header is None or header.epoch != worker.epoch:
                continue  # nothing, or of an earlier life; the worker writes it soon
            if follow.needs_seq is not None:
                if header.seq >= follow.needs_seq:
                    await self._load(worker, follow, follow.needs_seq)
                else:
                    await self._ask(worker, follow)
            elif header.seq + FAR_EVENTS < (self._mirror.seq(worker) or 0):
                self._distrust(worker, follow, IndexFault.AHEAD, header.seq + 1)
            elif header.seq <= (self._mirror.seq(worker) or 0):
                follow.confirmed_at_s, follow.suspect_seq = self._clock.now_s(), None
            elif follow.suspect_seq == self._mirror.seq(worker):
                self._distrust(worker, follow, IndexFault.BEHIND, header.seq)
            else:  # the events in between may be on their way
                follow.suspect_seq = self._mirror.seq(worker)
        self._forget_unconfirmed()

    def _settled(self) -> bool:
        return all(follow.needs_seq is None and follow.suspect_seq is None for follow in self._follows.values())

    async def _load(self, worker: WorkerKey, follow: _Follow, needs_seq: int) -> None:
        key = snapshot_key(self._cluster, worker.worker_id)
        value = cast(bytes, await answer(self._redis.getrange(key, 0, MAX_SNAPSHOT_BYTES), ANSWER_TIMEOUT_S))
        try:
            snapshot = decode_snapshot(value)
        except PrefixEventError as error:
            self._malformed(worker, error)
            return
        if snapshot.epoch != worker.epoch or snapshot.seq < needs_seq:
            return  # written anew since its header was read
        for _ in self._mirror.loading(worker.worker_id, snapshot):
            await asyncio.sleep(0)
            if self._follows.get(worker) is not follow:
                self._mirror.drop(worker)
                return
        follow.confirmed_at_s, follow.needs_seq, follow.suspect_seq = self._clock.now_s(), None, None

    async def _ask(self, worker: WorkerKey, follow: _Follow) -> None:
        """For a snapshot: the worker looks for the key every few seconds. It may never see that one is needed."""
        now_s = asyncio.get_running_loop().time()
        if follow.asked_at_s is None or now_s - follow.asked_at_s > ASK_S:
            follow.asked_at_s = now_s
            key = wanted_key(self._cluster, worker.worker_id)
            await answer(self._redis.set(key, b"1", px=round(ASK_S * 1000)), self._answer_timeout_s)

    def _header(self, worker: WorkerKey, value: bytes) -> SnapshotHeader | None:
        try:
            return decode_snapshot_header(value)
        except PrefixEventError as error:
            self._malformed(worker, error)
            return None

    def _malformed(self, worker: WorkerKey, error: PrefixEventError) -> None:
        self._faults[IndexFault.MALFORMED] += 1
        log.warning("bad prefix snapshot", extra={"worker": worker.worker_id, "error": str(error)})

    def _distrust(self, worker: WorkerKey, follow: _Follow, fault: IndexFault, needs_seq: int) -> None:
        """No credit until there is a snapshot up to `needs_seq`: an older one would lead to the same place."""
        self._faults[fault] += 1
        self._mirror.drop(worker)
        follow.needs_seq, follow.suspect_seq = needs_seq, None
        self._check_due_s = 0.0

    def _forget_unconfirmed(self) -> None:
        now_s = self._clock.now_s()
        for worker, follow in self._follows.items():
            if follow.needs_seq is None and now_s - follow.confirmed_at_s > MAX_STALE_S:
                self._distrust(worker, follow, IndexFault.UNCONFIRMED, 0)

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


def _portions(entries: Entries) -> Iterator[Entries]:
    """The entries of one read, in portions of about APPLY_BYTES."""
    portion: Entries = []
    size_bytes = 0
    for entry in entries:
        portion.append(entry)
        size_bytes += len(entry[1].get(EVENT_FIELD, b""))
        if size_bytes >= APPLY_BYTES:
            yield portion
            portion, size_bytes = [], 0
    if portion:
        yield portion
