"""What Redis lost, reverted, or was given by others: credit is lost for a while, never invented."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from router.prefix_index.follower import IndexFault, PrefixFollower
from router.prefix_index.mirror import WorkerKey
from router.testing.index import A1, A2, CHAIN, CHECK_S, IndexKeyWriter, IndexReplica, RedisServer, publishing, store
from router.testing.stub_worker import until
from tandem.kvcache.prefix_events import (
    EVENT_FIELD,
    PrefixEvent,
    PrefixSnapshot,
    decode_snapshot_header,
    encode_event,
    encode_snapshot,
    entry_id,
    join_hashes,
    snapshot_key,
    stream_key,
    wanted_key,
)
from worker.event_publisher import EventPublisher

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "routing.md").read_text()


@pytest.fixture
async def hand(server: RedisServer, side: IndexReplica) -> IndexKeyWriter:
    """A router that has followed up to event 5 and knows three blocks."""
    hand = IndexKeyWriter(server)
    hand.snapshot(5, 3)
    side.follower.set_workers([A1])
    await side.sees({A1: 3})
    return hand


async def test_gap_gives_no_credit_and_asks_for_a_snapshot_that_is_new_enough(
    side: IndexReplica, hand: IndexKeyWriter
) -> None:
    hand.event(7, 4)
    await side.sees({})
    await until(lambda: bool(hand.redis.exists(wanted_key("c", "a"))))
    assert side.follower.faults == {IndexFault.GAP: 1}, "the snapshot before the gap is not loaded again and again"
    hand.snapshot(6, 2)
    await side.sees({A1: 4})


async def test_long_backlog_with_a_gap_in_its_middle_is_one_fault(side: IndexReplica, hand: IndexKeyWriter) -> None:
    with hand.redis.pipeline(transaction=True) as pipe:
        for seq in [*range(6, 200), *range(201, 450)]:
            value = encode_event(PrefixEvent(1, seq, True, CHAIN[seq % 8] * 100))
            pipe.xadd(stream_key("c", "a"), {EVENT_FIELD: value}, id=entry_id(1, seq))
        pipe.execute()
    await side.sees({})
    await asyncio.sleep(0.1)
    assert side.follower.faults == {IndexFault.GAP: 1}
    hand.snapshot(200, 6)
    await side.sees({A1: 8})


async def test_events_lost_without_another_are_noticed_by_the_newer_snapshot(
    side: IndexReplica, hand: IndexKeyWriter
) -> None:
    hand.snapshot(6, 1)
    await side.sees({A1: 1})
    assert side.follower.faults == {IndexFault.BEHIND: 1}


async def test_older_snapshot_is_not_taken_by_a_router_that_knows_more(
    side: IndexReplica, hand: IndexKeyWriter
) -> None:
    hand.snapshot(3, 8)
    await asyncio.sleep(4 * CHECK_S)
    assert side.mirror.match(CHAIN) == {A1: 3}
    hand.event(6, 4)
    await side.sees({A1: 4})


MALFORMED = {"empty": b"", "unknown": b"\x63\x01", "short": b"\x01\x01short", "long": b"\x01\x01" + bytes(16 * 20_000)}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)  # pytest puts the id into the environment
async def test_malformed_entry_costs_the_credit_of_its_worker_until_the_next_snapshot(
    side: IndexReplica, hand: IndexKeyWriter, value: bytes
) -> None:
    hand.entry(entry_id(1, 6), value)
    await side.sees({})
    await asyncio.sleep(4 * CHECK_S)
    assert side.follower.faults == {IndexFault.MALFORMED: 1}
    assert side.follower.connected
    hand.snapshot(6, 2)
    await side.sees({A1: 2})


async def test_malformed_snapshot_is_counted_and_the_next_one_is_taken(
    side: IndexReplica, hand: IndexKeyWriter
) -> None:
    hand.event(9, 4)
    hand.redis.set(snapshot_key("c", "a"), b"\x63 no snapshot of ours, and long enough")
    await until(lambda: side.follower.faults.get(IndexFault.MALFORMED, 0) > 1)
    assert side.mirror.match(CHAIN) == {}
    value = encode_snapshot(PrefixSnapshot(1, 9, b""))
    hand.redis.set(snapshot_key("c", "a"), value + b"no whole hash")
    await asyncio.sleep(4 * CHECK_S)
    assert side.mirror.match(CHAIN) == {}
    hand.snapshot(9, 2)
    await side.sees({A1: 2})


async def test_entry_of_another_life_gives_nobody_credit(side: IndexReplica, hand: IndexKeyWriter) -> None:
    hand.event(1, 8, epoch=2)
    await side.sees({})
    hand.snapshot(1, 8, epoch=2)
    await asyncio.sleep(4 * CHECK_S)
    assert side.mirror.match(CHAIN) == {}
    side.follower.set_workers([A2])
    await side.sees({A2: 8})


@pytest.mark.acceptance(45, here="as stated")
async def test_forged_events_give_credit_only_until_the_worker_looks(server: RedisServer, side: IndexReplica) -> None:
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 2)
        await side.sees({A1: 2})
        redis = Redis.from_url(server.url)
        entries: Any = redis.xrange(stream_key("c", "a"))
        last = max((entry.decode() for entry, _ in entries), default=None)
        stored: Any = redis.get(snapshot_key("c", "a"))
        header = decode_snapshot_header(stored)
        seq = header.seq if last is None else int(last.split("-")[1])
        for ahead in range(1, 40):
            try:
                IndexKeyWriter(server).event(seq + ahead, 8)
            except RedisError:
                break  # the worker has looked
        assert ahead > 1
        await side.sees({A1: 2})
        store(publisher, 3)
        await side.sees({A1: 3})


async def test_forged_snapshot_gives_credit_only_until_the_worker_looks(
    server: RedisServer, side: IndexReplica
) -> None:
    async with publishing(server) as publisher:
        store(publisher, 2)
        await until(lambda: bool(Redis.from_url(server.url).exists(snapshot_key("c", "a"))))
        IndexKeyWriter(server).snapshot((1 << 64) - 1, 8)
        side.follower.set_workers([A1])
        await side.sees({A1: 2})
        store(publisher, 3)
        await side.sees({A1: 3})


async def test_redis_put_back_to_older_contents_is_brought_up_to_date(server: RedisServer, side: IndexReplica) -> None:
    redis = Redis.from_url(server.url)
    keys = [snapshot_key("c", "a"), stream_key("c", "a")]
    async with publishing(server) as publisher:
        store(publisher, 8)
        await until(lambda: bool(redis.exists(keys[0])))
        store(publisher, 8)
        await until(lambda: bool(redis.exists(keys[1])))
        older = [redis.dump(key) for key in keys]
        side.follower.set_workers([A1])
        await side.sees({A1: 8})
        publisher.publish(False, join_hashes(CHAIN[2:]))
        await side.sees({A1: 2})
        for key, value in zip(keys, older, strict=True):
            assert value is not None
            redis.restore(key, 0, value, replace=True)
        await until(lambda: redis.dump(keys[0]) != older[0])  # the worker noticed
        await side.sees({A1: 2})
        late = IndexReplica(server)
        late.follower.start()
        late.follower.set_workers([A1])
        await late.sees({A1: 2})
        await late.follower.close()


async def test_hole_in_the_stream_is_bridged_by_a_snapshot_the_router_asked_for(
    server: RedisServer, side: IndexReplica
) -> None:
    redis = Redis.from_url(server.url)
    async with publishing(server) as publisher:
        await until(lambda: bool(redis.exists(snapshot_key("c", "a"))))
        for count in (1, 2, 3):
            store(publisher, count)
        await until(lambda: redis.xlen(stream_key("c", "a")) == 3)
        entries: Any = redis.xrange(stream_key("c", "a"))
        redis.xdel(stream_key("c", "a"), entries[1][0])
        side.follower.set_workers([A1])
        await side.sees({A1: 3})
    assert side.follower.faults == {IndexFault.GAP: 1}


async def test_keys_of_another_type_are_written_anew(server: RedisServer, side: IndexReplica) -> None:
    redis = Redis.from_url(server.url)
    side.follower.set_workers([A1])
    async with publishing(server) as publisher:
        store(publisher, 3)
        await side.sees({A1: 3})
        redis.set(stream_key("c", "a"), b"no stream")
        redis.delete(snapshot_key("c", "a"))
        redis.lpush(snapshot_key("c", "a"), b"no snapshot")
        store(publisher, 4)
        await side.sees({A1: 4})


async def test_users_with_nothing_but_the_documented_commands_are_enough(
    server: RedisServer, side: IndexReplica
) -> None:
    worker, router = (re.findall(r"\+\w+", listed) for listed in re.findall(r"`((?:\+\w+[ \n]?)+)`", PAGE))
    admin = Redis.from_url(server.url)
    for user, commands in (("worker", worker), ("router", router)):
        acl = ("ACL", "SETUSER", user, "on", ">secret", "~tandem:*", "resetchannels", *commands)
        admin.execute_command(*acl)  # type: ignore[no-untyped-call]
    admin.execute_command("ACL", "SETUSER", "default", "off")  # type: ignore[no-untyped-call]
    path = server.url.removeprefix("unix://")
    publisher = EventPublisher(
        cluster="c", worker_id="a", epoch=1, redis_url=f"unix://worker:secret@{path}", heartbeat_s=0.1
    )
    task = asyncio.create_task(publisher.run())
    follower = PrefixFollower(f"unix://router:secret@{path}", "c", side.mirror, side.clock)
    await side.follower.close()
    follower.start()
    follower.set_workers([A1])
    store(publisher, 3)
    await side.sees({A1: 3})
    admin.xadd(stream_key("c", "a"), {EVENT_FIELD: b""}, id="1-*")
    await side.sees({})
    await side.sees({A1: 3})
    store(publisher, 5)
    await side.sees({A1: 5})
    task.cancel()
    await asyncio.gather(task, follower.close(), return_exceptions=True)
    assert admin.keys() == []


@pytest.mark.acceptance(9, here="the index: no request ever waits for it")
async def test_redis_that_never_answers_costs_requests_nothing(side: IndexReplica, tmp_path: Path) -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_unix_server(lambda _, writer: connections.append(writer), tmp_path / "silent.sock")
    follower = PrefixFollower(f"unix://{tmp_path}/silent.sock", "c", side.mirror, side.clock, answer_timeout_s=0.3)
    side.mirror.load("a", PrefixSnapshot(1, 0, join_hashes(CHAIN)))
    follower.set_workers([A1])
    follower.start()
    while follower.connected:
        await asyncio.sleep(0)
        assert side.mirror.match(CHAIN) == {A1: 8}
    assert side.mirror.match(CHAIN) == {A1: 8}
    await follower.close()
    silent.close()
    for connection in connections:
        connection.close()


@pytest.mark.acceptance(8, here="one index")
async def test_whole_index_is_back_soon_after_redis_lost_it(server: RedisServer, side: IndexReplica) -> None:
    workers = [WorkerKey(f"w{number}", 1) for number in range(12)]
    publishers = [
        EventPublisher(cluster="c", worker_id=key.worker_id, epoch=1, redis_url=server.url, heartbeat_s=0.2)
        for key in workers
    ]
    tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
    for publisher in publishers:
        store(publisher, 8)
    side.follower.set_workers(workers)
    await side.sees(dict.fromkeys(workers, 8))
    Redis.from_url(server.url).flushall()
    for publisher in publishers[:6]:
        publisher.publish(False, CHAIN[4])
    await side.sees(dict.fromkeys(workers[:6], 4) | dict.fromkeys(workers[6:], 8))
    late = IndexReplica(server)
    late.follower.start()
    late.follower.set_workers(workers)
    await late.sees(dict.fromkeys(workers[:6], 4) | dict.fromkeys(workers[6:], 8))
    await late.follower.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
