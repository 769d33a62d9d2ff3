"""Limits of the HTTP edge: connections, headers, and how long a client may keep the router waiting."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from router.testing.stub_worker import until
from tandem.config.router import RouterSpec
from tests.unit.router.conftest import MODEL, Cluster

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def client_timeout_s() -> float:
    return 0.4


@pytest.fixture
def keep_alive_s() -> float:
    return 0.4


@pytest.fixture
def spec(client_timeout_s: float, keep_alive_s: float) -> RouterSpec:
    return RouterSpec(
        http_port=0, grpc_port=0, max_connections=4, client_timeout_s=client_timeout_s, keep_alive_s=keep_alive_s
    )


async def connect(cluster: Cluster, *said: bytes) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.app.http_port)
    for part in said:
        writer.write(part)
        await asyncio.sleep(0.01)
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.parametrize(
    "said",
    [
        [],
        [HEAD],
        [HEAD + b"content-length: 100\r\n\r\n{"],
        [HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"],
        [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /health HTTP/1.1\r\n"],
    ],
    ids=["nothing", "head", "body", "chunks", "the second head"],
)
@pytest.mark.parametrize("keep_alive_s", [60.0])
async def test_a_request_that_does_not_end_is_answered_408(cluster: Cluster, said: list[bytes]) -> None:
    reader, writer = await connect(cluster, *said)
    answers = await rest(reader)
    assert answers.rpartition(b"HTTP/1.1")[2].startswith(b" 408 ")
    writer.close()


async def test_a_client_that_sends_headers_one_by_one_is_answered_408_too(cluster: Cluster) -> None:
    reader, writer = await connect(cluster, HEAD)

    async def drip() -> None:
        while True:
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(30):
        # Not the rest: a header that arrives after the router has closed resets the connection.
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    dripping.cancel()
    writer.close()


@pytest.mark.parametrize("client_timeout_s", [60.0])
@pytest.mark.parametrize(("count", "status"), [(128, b"200"), (129, b"431")])
async def test_a_request_has_at_most_so_many_headers(cluster: Cluster, count: int, status: bytes) -> None:
    body = b'{"model":"tiny","prompt":"x","max_tokens":1}'
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n" % len(body)
    more = b"".join(b"a%d: b\r\n" % number for number in range(count - head.count(b": ")))
    reader, writer = await connect(cluster, head + more + b"\r\n" + body)
    answer = await rest(reader)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1") == 1
    assert bool(cluster.decode.received) == (status == b"200")


@pytest.mark.parametrize("client_timeout_s", [60.0])
async def test_a_client_that_leaves_after_a_large_body_is_noticed(cluster: Cluster) -> None:
    cluster.says("slowly" * 20)
    cluster.decode.behaviour.token_delay_s = 0.05
    body = b'{"model":"tiny","prompt":"x","max_tokens":100' + b" " * 300_000 + b"}"
    _, writer = await connect(cluster, HEAD + b"content-length: %d\r\n\r\n" % len(body), body)
    await until(lambda: bool(cluster.decode.received))
    writer.close()
    await until(lambda: cluster.ends("cancelled") == 1)


async def test_a_connection_without_a_request_is_closed(cluster: Cluster) -> None:
    reader, writer = await connect(cluster, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await rest(reader)).endswith(b'{"status":"ok"}')
    writer.close()


@pytest.mark.slow
async def test_the_client_timeout_does_not_apply_to_the_answer(cluster: Cluster) -> None:
    cluster.says("slowly")
    cluster.decode.behaviour.token_delay_s = 0.3
    assert (await cluster.openai.completions.create(model="tiny", prompt="x")).choices[0].text == "slowly"
    await cluster.settled()


@pytest.mark.parametrize("client_timeout_s", [60.0])
async def test_one_connection_too_many_is_refused_and_the_others_serve(cluster: Cluster) -> None:
    held = [await connect(cluster, HEAD) for _ in range(4)]
    reader, writer = await connect(cluster)
    answer = await rest(reader)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer
    writer.close()
    for _, each in held:
        each.close()
    async with asyncio.timeout(30):
        while (await cluster.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)


async def test_two_pipelined_streams_are_answered_in_order(cluster: Cluster) -> None:
    """They share a connection and nothing of their answers."""
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}).encode()
    ask = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    reader, writer = await connect(cluster, ask + ask)
    _, *answers = (await rest(reader)).split(b"HTTP/1.1 200 OK\r\n")
    ids = [re.findall(rb'"id":"([^"]+)"', answer) for answer in answers]
    assert [len(each) for each in ids] == [5, 5]
    assert [len({*each}) for each in ids] == [1, 1]
    assert ids[0][0] != ids[1][0]
    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)
    writer.close()
