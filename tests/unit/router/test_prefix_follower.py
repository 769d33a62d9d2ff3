"""Publisher and follower against a real server: what a worker publishes is what a router matches."""

import asyncio
from pathlib import Path

import pytest
from redis import Redis

from router.prefix_index.follower import MAX_STALE_S
from router.testing.index import A1, A2, CHAIN, IndexReplica, RedisServer, publishing, store
from router.testing.stub_worker import until
from tandem.kvcache.prefix_events import decode_snapshot, join_hashes, snapshot_key, split_hashes, stream_key
from worker.event_publisher import EventPublisher


async def test_router_learns_what_workers_store_and_drop(server: RedisServer, side: IndexReplica) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        publisher.publish(False, CHAIN[1])
        await side.sees({A1: 1})
        publisher.publish(True, join_hashes(CHAIN[1:6]))
        await side.sees({A1: 6})


async def test_router_that_comes_later_starts_from_the_snapshot(server: RedisServer, side: IndexReplica) -> None:
    async with publishing(server) as publisher:
        for count in range(1, 6):
            store(publisher, count)
            await asyncio.sleep(0.02)
        side.follower.set_workers([A1])
        await side.sees({A1: 5})


async def test_many_events_stay_within_a_bounded_stream(server: RedisServer, side: IndexReplica) -> None:
    side.follower.set_workers([A1])
    async with publishing(server, stream_entries=16) as publisher:
        for round_ in range(40):
            publisher.publish(round_ % 2 == 0, join_hashes(CHAIN[:4]))
            if round_ % 7 == 0:
                await asyncio.sleep(0.01)
        store(publisher, 7)
        await side.sees({A1: 7})
        assert Redis.from_url(server.url).xlen(stream_key("c", "a")) < 200


async def test_restarted_redis_is_filled_again(server: RedisServer, side: IndexReplica) -> None:
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


async def test_emptied_redis_is_filled_again(server: RedisServer, side: IndexReplica) -> None:
    async with publishing(server) as publisher:
        store(publisher, 3)
        client = Redis.from_url(server.url)
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
        client.flushall()
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
        side.follower.set_workers([A1])
        await side.sees({A1: 3})


async def test_mirror_ages_out_while_redis_stays_away(server: RedisServer, side: IndexReplica) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        server.kill()
        await until(lambda: not side.follower.connected)
        side.clock.advance(MAX_STALE_S + 1)
        await side.sees({})


async def test_new_epoch_gets_no_credit_for_the_old(server: RedisServer, side: IndexReplica) -> None:
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


async def test_worker_that_ends_leaves_no_keys(server: RedisServer) -> None:
    client = Redis.from_url(server.url)
    async with publishing(server) as publisher:
        store(publisher, 3)
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
    assert client.keys("*") == []


async def test_what_a_worker_stores_while_redis_is_away_is_found_once_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = RedisServer(tmp_path)
    async with publishing(absent) as publisher:
        for _ in range(200):
            store(publisher, 8)
        await until(lambda: "redis is not reachable" in caplog.text)
        store(publisher, 8)
        absent.start()
        client = Redis.from_url(absent.url)
        await until(lambda: bool(client.exists(snapshot_key("c", "a"))))
        stored = client.get(snapshot_key("c", "a"))
        assert isinstance(stored, bytes)
        found = decode_snapshot(stored)
        assert {*split_hashes(found.hashes)} == {*CHAIN}
        client.close()
    absent.kill()


async def test_without_a_redis_of_its_own_a_worker_publishes_nothing() -> None:
    silent = EventPublisher(cluster="c", worker_id="a", epoch=1, redis_url=None)
    store(silent, 8)
    async with asyncio.timeout(60.0):
        await silent.run()
