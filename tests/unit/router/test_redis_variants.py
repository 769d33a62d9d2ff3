"""The prefix index through each way of setting up Redis: a worker's events reach a router, and a loss is made good."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from cluster.spec.redis_probe import check_redis
from router.testing.index import A1, BINARIES, CHAIN, HasUrl, IndexReplica, RedisServer, publishing, store
from router.testing.redis_server import HOST, RedisAddress, behind_tls, sharded, watched_pair
from router.testing.stub_worker import until
from tandem.errors import ConfigError
from tandem.rpc.redis_client import REDIS_ERRORS, answer, connect

# redis-py leaves connections of cluster and Sentinel clients to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collects them here, where their warnings are expected, and not in a test of another file."""
    yield
    gc.collect()


@pytest.fixture(params=BINARIES, ids=lambda binary: Path(binary).name)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def following(place: HasUrl) -> AsyncIterator[IndexReplica]:
    side = IndexReplica(place)
    side.follower.start()
    side.follower.set_workers([A1])
    yield side
    await side.follower.close()


async def test_over_tls_with_the_authority_that_the_url_names(
    server: RedisServer, tmp_path: Path, authority: Callable[[str], Any]
) -> None:
    ours, other = authority("ours"), authority("theirs")
    async with behind_tls(tmp_path / "redis.sock", ours.issue("server")) as port:
        url = f"rediss://{HOST}:{port}/0?ssl_check_hostname=false&ssl_ca_certs="
        place = RedisAddress(f"{url}{ours.ca}")
        async with publishing(place) as publisher, following(place) as side:
            store(publisher, 5)
            await side.sees({A1: 5})
            stranger = IndexReplica(RedisAddress(f"{url}{other.ca}"))
            stranger.follower.start()
            stranger.follower.set_workers([A1])
            async with following(place) as late:
                await late.sees({A1: 5})
            assert stranger.mirror.match(CHAIN) == {}
            assert not stranger.follower.connected
            await stranger.follower.close()


async def test_with_a_certificate_of_our_own_where_the_server_asks_for_one(
    server: RedisServer, tmp_path: Path, authority: Callable[[str], Any]
) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    async with behind_tls(tmp_path / "redis.sock", ours.issue("server"), ours.ca) as port:
        url = f"rediss://{HOST}:{port}/0?ssl_check_hostname=false&ssl_ca_certs={ours.ca}"
        shown = {name: each.issue(name) for name, each in (("router", ours), ("stranger", theirs))}
        known, stranger = (f"{url}&ssl_certfile={f['cert']}&ssl_keyfile={f['key']}" for f in shown.values())
        assert await asyncio.to_thread(check_redis, known)
        for refused in (url, stranger):
            with pytest.raises(ConfigError, match=r"redis\.url: expected a Redis or Valkey"):
                await asyncio.to_thread(check_redis, refused)
        place = RedisAddress(known)
        async with publishing(place) as publisher, following(place) as side:
            store(publisher, 5)
            await side.sees({A1: 5})


@pytest.mark.slow
async def test_sentinels_lead_to_the_new_master(binary: str, tmp_path: Path) -> None:
    with watched_pair(tmp_path, binary) as (place, master):
        assert await asyncio.to_thread(check_redis, place.url)
        async with publishing(place) as publisher, following(place) as side:
            store(publisher, 3)
            await side.sees({A1: 3})
            await asyncio.to_thread(master.kill)
            store(publisher, 6)
            await until(lambda: side.mirror.match(CHAIN) == {A1: 6})


@pytest.mark.slow
async def test_a_cluster_is_one_redis(binary: str, tmp_path: Path) -> None:
    with sharded(tmp_path, binary) as (place, nodes):
        assert await asyncio.to_thread(check_redis, place.url)
        async with publishing(place) as publisher, following(place) as side:
            store(publisher, 5)
            await side.sees({A1: 5})
            for node in nodes:
                node.redis.flushall()
            store(publisher, 7)
            await side.sees({A1: 7})
            async with following(place) as late:
                await late.sees({A1: 7})


@pytest.mark.parametrize(
    "url",
    ["http://x", "redis+sentinel://x:1", "redis+sentinel:///ours", "redis+cluster://", "redis+cluster://x:word"],
)
def test_what_is_no_url_of_ours_is_refused_by_the_field_s_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: expected"):
        check_redis(url, timeout_s=0.5)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        check_redis("redis+sentinel://user:hunter2@127.0.0.1:1,127.0.0.1:2/ours", timeout_s=0.5)
    assert "hunter2" not in caught.value.message
    assert "127.0.0.1:1,127.0.0.1:2" in caught.value.message


async def test_a_cluster_of_which_no_node_answers_is_away_like_any_other_redis() -> None:
    """Its client raises what is no RedisError, which ended workers."""
    client = connect("redis+cluster://127.0.0.1:1")

    async def in_a_transaction() -> None:
        async with client.pipeline(transaction=True) as pipe:
            pipe.set("a", b"1")
            await answer(pipe.execute())

    with pytest.raises(REDIS_ERRORS):
        await answer(client.set("a", b"1"))
    with pytest.raises(REDIS_ERRORS):
        await in_a_transaction()
    await client.aclose()


def test_every_error_of_the_client_is_known() -> None:
    found = [each for each in vars(redis.exceptions).values() if isinstance(each, type) and issubclass(each, Exception)]
    unknown = {each.__name__ for each in found if not issubclass(each, REDIS_ERRORS)}
    assert unknown == {"ChildDeadlockedError", "IncorrectPolicyType"}, "none says that Redis is away"
