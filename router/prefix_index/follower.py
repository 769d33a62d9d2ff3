"""Keeps the prefix mirror up to date from Redis: loads snapshots, follows each worker's stream, verifies the result.

The list of workers comes from the directory, not from Redis. No request waits for Redis, and no other module of the
router uses it. While Redis is away the mirror stays as it was; after MAX_STALE_S without confirmation a worker's blocks
are dropped. docs/routing.md describes each recovery.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from redis.typing import KeyT, StreamIdT

from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from tandem.backoff import Backoff
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
from tandem.rpc.redis_client import ANSWER_TIMEOUT_S, REDIS_ERRORS, answer, connect

log = logging.getLogger(__name__)

MAX_STALE_S = 60.0
CHECK_S = 1.0  # between checks of the snapshots' headers
SNAPSHOT_POLL_S = 0.25  # the same while a worker lacks its snapshot or may be behind
READ_PAUSE_S = 0.01  # collects events into batches: applying many costs little more than one
READ_ENTRIES = 512  # of each worker
APPLY_BYTES = 64 << 10  # applied at once: 2 ms, then other tasks run
FAR_EVENTS = 1 << 20  # a worker rewrites its snapshot long before this many events
SNAPSHOT_REQUEST_S = 5.0  # between requests for the same snapshot
# With MAX_BACKOFF_S, the router notices within 5 s that Redis is back.
QUICK_ANSWER_S = 2.0  # for everything except whole snapshots
MAX_BACKOFF_S = 2.0

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class IndexFault(StrEnum):
    """Why the blocks of a worker were dropped, or its data in Redis was unusable."""

    GAP = "gap"  # events are missing
    OTHER_EPOCH = "other_epoch"  # its stream has an entry of another epoch
    MALFORMED = "malformed"  # an entry or a snapshot cannot be decoded
    BEHIND = "behind"  # the snapshot is newer than the end of the stream
    AHEAD = "ahead"  # the stream is far ahead of the snapshot: forged events, or Redis was restored
    UNCONFIRMED = "unconfirmed"  # Redis or the worker's keys were away for too long


@dataclass(slots=True)
class _Follow:
    """The state of following one epoch of a worker."""

    confirmed_at_s: float
    needs_seq: int | None = 0  # needs a snapshot up to at least this event; None: following the stream
    suspect_seq: int | None = None  # the last event applied when the snapshot was found to be newer
    requested_at_s: float | None = None  # when a snapshot was requested


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
        """Sets the workers to follow, from the directory. Drops all others at once."""
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
        backoff = Backoff(first_s=0.1, most_s=MAX_BACKOFF_S)
        while True:
            try:
                await self._follow_once()
                if not self.connected:
                    log.info("redis is back")
                self.connected = True
                backoff.reset()
            except Exception as error:  # no fault of Redis or its client may end this task
                if not isinstance(error, REDIS_ERRORS):
                    log.exception("failed to follow the prefix events; retrying")
                if self.connected:
                    log.warning("redis is not reachable; the prefix index is frozen", extra={"error": str(error)})
                self.connected = False
                self._check_due_s = 0.0  # Redis may come back empty or with older data
                self._forget_unconfirmed()
                await backoff.wait()

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
        # redis-py's type is a union over protocols and decoders; this is protocol 2, undecoded.
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
            return  # removed during the read, or reset by an earlier entry
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
                self._reset(worker, follow, IndexFault.GAP, before + 1)
            case Applied.OTHER_EPOCH:
                self._reset(worker, follow, IndexFault.OTHER_EPOCH, before + 1)
            case Applied.OK if bad is not None:
                log.warning("bad prefix event", extra={"worker": worker.worker_id, "error": str(bad)})
                self._reset(worker, follow, IndexFault.MALFORMED, (self._mirror.seq(worker) or 0) + 1)

    async def _check(self) -> None:
        """Compares each worker with the header of its snapshot, and loads the snapshots needed."""
        workers = list(self._follows)
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.getrange(snapshot_key(self._cluster, worker.worker_id), 0, SNAPSHOT_HEADER_BYTES - 1)
            values = cast(list[bytes], await answer(pipe.execute(), self._answer_timeout_s) if workers else [])
        for worker, value in zip(workers, values, strict=True):
            follow = self._follows.get(worker)
            header = self._header(worker, value) if value else None  # no key reads as empty
            if follow is None or header is None or header.epoch != worker.epoch:
                continue  # missing, or of an earlier epoch; the worker will write it
            if follow.needs_seq is not None:
                if header.seq >= follow.needs_seq:
                    await self._load(worker, follow, follow.needs_seq)
                else:
                    await self._request_snapshot(worker, follow)
            elif header.seq + FAR_EVENTS < (self._mirror.seq(worker) or 0):
                self._reset(worker, follow, IndexFault.AHEAD, header.seq + 1)
            elif header.seq <= (self._mirror.seq(worker) or 0):
                follow.confirmed_at_s, follow.suspect_seq = self._clock.now_s(), None
            elif follow.suspect_seq == self._mirror.seq(worker):
                self._reset(worker, follow, IndexFault.BEHIND, header.seq)
            else:  # the events in between may not have arrived yet
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
            return  # rewritten since its header was read
        for _ in self._mirror.load_in_steps(worker.worker_id, snapshot):
            await asyncio.sleep(0)
            if self._follows.get(worker) is not follow:
                self._mirror.drop(worker)
                return
        follow.confirmed_at_s, follow.needs_seq, follow.suspect_seq = self._clock.now_s(), None, None

    async def _request_snapshot(self, worker: WorkerKey, follow: _Follow) -> None:
        """Sets a key that the worker polls every few seconds; otherwise it may never write the snapshot needed."""
        now_s = asyncio.get_running_loop().time()
        if follow.requested_at_s is None or now_s - follow.requested_at_s > SNAPSHOT_REQUEST_S:
            follow.requested_at_s = now_s
            key = wanted_key(self._cluster, worker.worker_id)
            await answer(self._redis.set(key, b"1", px=round(SNAPSHOT_REQUEST_S * 1000)), self._answer_timeout_s)

    def _header(self, worker: WorkerKey, value: bytes) -> SnapshotHeader | None:
        try:
            return decode_snapshot_header(value)
        except PrefixEventError as error:
            self._malformed(worker, error)
            return None

    def _malformed(self, worker: WorkerKey, error: PrefixEventError) -> None:
        self._faults[IndexFault.MALFORMED] += 1
        log.warning("bad prefix snapshot", extra={"worker": worker.worker_id, "error": str(error)})

    def _reset(self, worker: WorkerKey, follow: _Follow, fault: IndexFault, needs_seq: int) -> None:
        """Drops the worker's blocks until there is a snapshot up to `needs_seq`: an older one repeats the fault."""
        self._faults[fault] += 1
        self._mirror.drop(worker)
        follow.needs_seq, follow.suspect_seq = needs_seq, None
        self._check_due_s = 0.0

    def _forget_unconfirmed(self) -> None:
        now_s = self._clock.now_s()
        for worker, follow in self._follows.items():
            if follow.needs_seq is None and now_s - follow.confirmed_at_s > MAX_STALE_S:
                self._reset(worker, follow, IndexFault.UNCONFIRMED, 0)

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


def _portions(entries: Entries) -> Iterator[Entries]:
    """Splits the entries of one read into portions of about APPLY_BYTES."""
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
