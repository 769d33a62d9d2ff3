"""The bodies that arrive at a time share a budget: 60 of them held 312 MB, and nothing bounded 8,192."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.edge.limits.bodies import EXEMPT_BYTES, SHARE_OF_ONE, BodyBudget
from tandem.config.router import RouterSpec
from tandem.errors import OverloadedError
from tests.unit.router.conftest import MODEL, Cluster

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
SENT = 200_000


@pytest.fixture
def spec() -> RouterSpec:
    return RouterSpec(http_port=0, grpc_port=0)


async def send_a_part(cluster: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.app.http_port)
    writer.write(HEAD + b" " * SENT)
    return reader, writer


async def until_held(budget: BodyBudget, count: int) -> None:
    async with asyncio.timeout(60):
        while budget.held_bytes != count:
            await asyncio.sleep(0.01)


async def test_a_body_that_finds_it_spent_is_refused_and_small_ones_need_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = cluster.app.bodies
    monkeypatch.setattr(budget, "_max_bytes", 300_000)
    holding = [await send_a_part(cluster) for _ in range(2)]
    await until_held(budget, 2 * (SENT - EXEMPT_BYTES))
    reader, writer = await send_a_part(cluster)
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in answer
    assert b"the bodies that the router receives now hold" in answer
    writer.close()
    cluster.says("well")
    assert (await cluster.openai.completions.create(model=MODEL, prompt="Hi")).choices[0].text == "well"
    for _, each in holding:
        each.close()
    await until_held(budget, 0)


async def test_bodies_of_one_address_are_refused_before_they_hold_the_budget_of_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.app.bodies, "_max_of_one", SENT - EXEMPT_BYTES)
    _, first = await send_a_part(cluster)
    await until_held(cluster.app.bodies, SENT - EXEMPT_BYTES)
    reader, second = await send_a_part(cluster)
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"of one key or address now hold" in answer
    first.close()
    second.close()
    await until_held(cluster.app.bodies, 0)


async def test_a_body_that_was_parsed_holds_nothing(cluster: Cluster) -> None:
    cluster.says("well")
    body = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
    answer = await cluster.http.post("/v1/completions", content=b" " * SENT + body)
    assert answer.status_code == 200
    assert cluster.app.bodies.held_bytes == 0


def test_what_was_refused_is_not_counted() -> None:
    budget = BodyBudget(10 * SHARE_OF_ONE)
    budget.take("one", 8)
    with pytest.raises(OverloadedError, match="retry later, or send less"):
        budget.take("one", 3)
    budget.take("one", 2)
    budget.give_back("one", 10)
    assert budget.held_bytes == 0


def test_what_one_caller_holds_leaves_room_to_others() -> None:
    budget = BodyBudget(10 * SHARE_OF_ONE)
    budget.take("one", 10)
    with pytest.raises(OverloadedError, match="of one key or address now hold"):
        budget.take("one", 1)
    for other in range(SHARE_OF_ONE - 1):
        budget.take(str(other), 10)
    with pytest.raises(OverloadedError, match="that the router receives now hold"):
        budget.take("last", 1)
    budget.give_back("one", 1)
    budget.take("one", 1)
