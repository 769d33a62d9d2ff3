"""Idempotency keys across routers, through a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from redis import Redis

from router.idempotency import shared_answers
from router.idempotency.answer_log import AnswerLog, Head
from router.idempotency.keyed_answers import KeyedAnswers, KeyedRequest, Produce
from router.idempotency.keyed_metrics import Api, Outcome
from router.idempotency.shared_answers import CLAIM_S, SharedAnswers
from router.testing.index import RedisServer
from router.testing.stub_worker import until
from tandem.clock import SystemClock
from tandem.config.router import IdempotencySpec
from tandem.errors import (
    AnswerNotKept,
    AnswerUnderWay,
    IdempotencyKeyReused,
    InputError,
    NoWorker,
    TandemError,
)

LEASE_S = 30.0  # also of a process that stands still for a while
HEAD = Head(200, ((b"content-type", b"text/event-stream"),))
ASKED = KeyedRequest(b"key", b"what", wait_s=60.0)


class Routers:
    """Routers that share answers; each run waits for `end`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: list[int] = []
        self.outcomes: list[tuple[int, Outcome]] = []
        self.head: Head | None = HEAD
        self.says_at_once = True
        self.end = asyncio.Event()
        self.failure: TandemError | None = None
        self.size_bytes = 10
        self.made: list[KeyedAnswers] = []

    def router(self, secret: str = "s", lease_s: float = LEASE_S, claim_s: float = 60.0, answer_s: float = 60.0) -> int:
        number = len(self.made)
        shared = SharedAnswers(
            self.url,
            "c",
            f"router-{number}",
            secret,
            60.0,
            SystemClock(),
            lease_s=lease_s,
            poll_s=0.02,
            claim_s=claim_s,
            answer_s=answer_s,
        )
        self.made.append(KeyedAnswers(IdempotencySpec(grace_s=0.0), shared, partial(self._count, number)))
        return number

    def _count(self, number: int, api: Api, outcome: Outcome) -> None:
        self.outcomes.append((number, outcome))

    def _produce(self, number: int) -> Produce:
        async def produce(log: AnswerLog) -> None:
            self.runs.append(number)
            if self.says_at_once:
                log.head = self.head
                log.append(b"begin ")
            await self.end.wait()
            if self.failure is not None:
                raise self.failure
            log.append(b"x" * self.size_bytes)

        return produce

    async def _read(self, number: int, asked: KeyedRequest) -> tuple[bytes, bool]:
        reader = self.made[number].read(asked, self._produce(number))
        try:
            content = b""
            while chunks := await reader.next():
                content += b"".join(chunks)
            assert reader.log.head == self.head
            return content, reader.log.is_replayed
        finally:
            reader.close()

    def ask(self, number: int, asked: KeyedRequest = ASKED) -> asyncio.Task[tuple[bytes, bool]]:
        return asyncio.create_task(self._read(number, asked))

    async def has_begun(self, number: int) -> None:
        await until(lambda: number in self.runs)


@pytest.fixture
async def routers(server: RedisServer) -> AsyncIterator[Routers]:
    found = Routers(server.url)
    found.router()
    found.router()
    yield found
    found.end.set()
    for each in found.made:
        await each.close()


DONE = b"begin " + b"x" * 10


async def test_another_router_waits_for_the_answer_under_way_and_serves_it(routers: Routers) -> None:
    owner = routers.router(lease_s=6.0)
    first = routers.ask(owner)
    await routers.has_begun(owner)
    redis = Redis.from_url(routers.url)
    [key] = redis.keys()
    left_ms = [redis.pttl(key)]
    second = routers.ask(1)

    def is_renewed() -> bool:
        left_ms.append(redis.pttl(key))
        return left_ms[-1] > left_ms[-2]

    await until(is_renewed)
    assert not second.done()
    routers.end.set()
    assert [await first, await second] == [(DONE, False), (DONE, True)]
    assert await routers.ask(1) == (DONE, True), "from its own memory now"
    assert routers.runs == [owner]


async def test_each_request_is_counted_by_its_outcome(routers: Routers) -> None:
    other = KeyedRequest(ASKED.identity, b"something else", wait_s=0.0)
    first = routers.ask(0)
    await routers.has_begun(0)
    attached, waiting = routers.ask(0), routers.ask(1)
    with pytest.raises(IdempotencyKeyReused):
        await routers.ask(0, other)
    routers.end.set()
    await asyncio.gather(first, attached, waiting)
    third = routers.router()
    with pytest.raises(IdempotencyKeyReused):
        await routers.ask(third, other)
    assert sorted(routers.outcomes) == [
        (0, Outcome.ATTACHED),
        (0, Outcome.CONFLICT),
        (0, Outcome.RUN),
        (1, Outcome.REPLAYED),
        (third, Outcome.CONFLICT),
    ]


async def test_an_answer_without_a_head_is_shared_chunk_by_chunk(routers: Routers) -> None:
    """As gRPC's: a chunk is a message."""
    routers.head = None
    routers.end.set()
    await routers.ask(0)
    reader = routers.made[1].read(ASKED, routers._produce(1))
    chunks: list[bytes] = []
    while more := await reader.next():
        chunks += more
    reader.close()
    assert chunks == [b"begin ", b"x" * 10]
    assert routers.runs == [0]


async def test_a_done_answer_comes_from_another_router_and_a_later_one_too(routers: Routers) -> None:
    routers.end.set()
    assert await routers.ask(0) == (DONE, False)
    assert await routers.ask(1) == (DONE, True)
    assert await routers.ask(routers.router()) == (DONE, True)
    assert routers.runs == [0]


async def test_two_routers_asked_at_once_run_it_once(routers: Routers) -> None:
    asked = [routers.ask(number) for number in (0, 1, 0, 1)]
    routers.end.set()
    assert {content for content, _ in await asyncio.gather(*asked)} == {DONE}
    assert len(routers.runs) == 1


async def test_a_waiting_router_runs_it_when_the_owner_has_died(routers: Routers, server: RedisServer) -> None:
    """A dead router renews no lease."""
    redis = Redis.from_url(server.url)
    first = routers.ask(0)
    await routers.has_begun(0)
    [key] = redis.keys()
    claim = redis.get(key)
    assert claim is not None
    first.cancel()
    await until(lambda: not redis.exists(key))
    redis.set(key, claim, px=500)
    second = routers.ask(1)
    await routers.has_begun(1)
    routers.end.set()
    assert await second == (DONE, False)
    assert routers.runs == [0, 1]


async def test_a_key_with_another_body_is_refused_and_the_right_one_still_served(routers: Routers) -> None:
    first = routers.ask(0)
    await routers.has_begun(0)
    with pytest.raises(IdempotencyKeyReused):
        await routers.ask(1, KeyedRequest(b"key", b"other", 60.0))
    routers.end.set()
    with pytest.raises(IdempotencyKeyReused):
        await routers.ask(1, KeyedRequest(b"key", b"other", 60.0))
    assert await routers.ask(1) == (DONE, True)
    await first


async def test_a_router_that_waits_too_long_says_when_to_retry(routers: Routers) -> None:
    first = routers.ask(0)
    await routers.has_begun(0)
    with pytest.raises(AnswerUnderWay) as refused:
        await routers.ask(1, KeyedRequest(b"key", b"what", 0.1))
    assert refused.value.retry_after_s == 1.0
    routers.end.set()
    assert await routers.ask(1) == (DONE, True)
    await first


async def test_a_failure_frees_the_key_for_all_routers_if_a_retry_may_help(routers: Routers) -> None:
    routers.end.set()
    routers.failure = NoWorker("none", retry_after_s=1.0)
    with pytest.raises(NoWorker):
        await routers.ask(0)
    routers.failure = None
    assert await routers.ask(1) == (DONE, False)
    assert routers.runs == [0, 1]


async def test_other_failures_are_kept_for_all_routers(routers: Routers) -> None:
    routers.end.set()
    routers.failure = InputError("wrong", field="x")
    for number in (0, 1):
        with pytest.raises(InputError, match="wrong") as refused:
            await routers.ask(number)
        assert refused.value.field == "x"
    assert routers.runs == [0]


async def test_a_large_answer_stays_with_its_router(routers: Routers) -> None:
    routers.size_bytes = shared_answers.MAX_SHARED_BYTES + 1
    routers.end.set()
    content, _ = await routers.ask(0)
    assert await routers.ask(0) == (content, False)
    with pytest.raises(AnswerNotKept):
        await routers.ask(1)


async def test_a_cancelled_run_frees_the_key(routers: Routers) -> None:
    first = routers.ask(0)
    await routers.has_begun(0)
    first.cancel()
    routers.end.clear()
    second = routers.ask(1)
    await routers.has_begun(1)
    routers.end.set()
    assert await second == (DONE, False)


async def test_a_forged_answer_is_not_served(routers: Routers, server: RedisServer) -> None:
    routers.end.set()
    await routers.ask(0)
    redis = Redis.from_url(server.url)
    [key] = redis.keys()
    value = redis.get(key)
    assert isinstance(value, bytes)
    redis.set(key, value.replace(b"begin", b"wrong"))
    assert await routers.ask(1) == (DONE, False)
    assert await routers.ask(routers.router(secret="other")) == (DONE, False)


async def test_values_in_redis_expire(routers: Routers, server: RedisServer) -> None:
    redis = Redis.from_url(server.url)
    first = routers.ask(0)
    await routers.has_begun(0)
    [key] = redis.keys()
    assert isinstance(key, bytes)
    assert key.startswith(b"tandem:{c}:idempotency:")
    assert 0 < redis.pttl(key) <= LEASE_S * 1000
    routers.end.set()
    await first
    assert 50_000 < redis.pttl(key) <= 60_000


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_redis_each_router_runs_it_once(routers: Routers, server: RedisServer, how: str) -> None:
    routers.end.set()
    numbers = [routers.router(answer_s=0.5) for _ in range(2)]
    server.kill() if how == "killed" else server.freeze()
    try:
        for number in numbers:
            assert await routers.ask(number) == (DONE, False)
            assert await routers.ask(number) == (DONE, False)
        assert routers.runs == numbers
    finally:
        if how == "frozen":
            server.thaw()


@pytest.mark.acceptance(
    9, here="a request with an idempotency key: it runs after 0.1 s, and its key holds if Redis answers after all"
)
async def test_a_request_does_not_wait_for_a_silent_redis_and_owns_its_key_when_that_answers(
    routers: Routers, server: RedisServer
) -> None:
    number = routers.router(claim_s=CLAIM_S)
    routers.end.set()
    await routers.ask(number, KeyedRequest(b"before", b"what", 60.0))  # which connects
    routers.end.clear()
    server.freeze()
    try:
        first = routers.ask(number)
        await until(lambda: routers.runs == [number, number])
    finally:
        server.thaw()
    redis = Redis.from_url(server.url)
    await until(lambda: len(redis.keys()) == 2)
    second = routers.ask(1)
    await until(
        lambda: redis.info("commandstats")["cmdstat_set"]["calls"] > 3
    )  # of the first key two, and each claim of the other
    routers.end.set()
    assert [await first, await second] == [(DONE, False), (DONE, True)]
    assert routers.runs == [number, number]


@pytest.mark.parametrize("body", [b"what", b"another"])
async def test_a_key_that_turns_out_to_be_anothers_stops_what_has_said_nothing(
    routers: Routers, server: RedisServer, body: bytes
) -> None:
    routers.end.set()
    number = routers.router(claim_s=CLAIM_S)
    await routers.ask(number, KeyedRequest(b"before", b"what", 60.0))  # which connects
    routers.end.clear()
    first = routers.ask(0)
    await routers.has_begun(0)
    server.freeze()
    try:
        routers.says_at_once = False
        second = routers.ask(number, KeyedRequest(b"key", body, 60.0))
        await until(lambda: routers.runs == [number, 0, number])
    finally:
        server.thaw()
    if body == b"another":
        with pytest.raises(IdempotencyKeyReused):
            await second
    else:
        redis = Redis.from_url(routers.url)
        await until(lambda: redis.info("commandstats")["cmdstat_set"]["calls"] > 4)  # it has stopped, and asks again
    routers.end.set()
    assert await first == (DONE, False)
    if body == b"what":
        assert await second == (DONE, True)
    assert routers.runs == [number, 0, number]


async def test_a_short_answer_does_not_wait_for_a_silent_redis(routers: Routers, server: RedisServer) -> None:
    number = routers.router(claim_s=CLAIM_S)  # 60 s until Redis counts as lost
    routers.end.set()
    await routers.ask(number, KeyedRequest(b"before", b"what", 60.0))
    server.freeze()
    try:
        assert await routers.ask(number) == (DONE, False)
    finally:
        server.thaw()
    assert await routers.ask(1) == (DONE, True), "written after all"


async def test_a_router_that_waits_does_not_run_it_because_redis_is_lost(routers: Routers, server: RedisServer) -> None:
    first = routers.ask(0)
    await routers.has_begun(0)
    second = routers.ask(1, KeyedRequest(b"key", b"what", 0.5))
    redis = Redis.from_url(server.url)
    await until(lambda: redis.info("commandstats")["cmdstat_set"]["calls"] > 1)
    server.kill()
    with pytest.raises(AnswerUnderWay):
        await second
    routers.end.set()
    assert await first == (DONE, False)
    assert routers.runs == [0]
