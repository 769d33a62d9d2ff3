"""Requests recorded as a trace: what simulate reads of them, and what is never in it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.cli.commands.record import Recorded, note
from planner.traces.read import read_trace
from router.edge.controller_api import SECRET_KEY
from router.observe.request_tap import MAX_LISTENERS
from router.testing.stub_worker import until
from tandem.v1 import trace_pb2, trace_pb2_grpc
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
SECRET = ((SECRET_KEY, "only-the-controller-knows"),)
SALT = b"0123456789abcdef"
PROMPT_S, TOKEN_S = 0.05, 0.1
SHARED = "one and the same beginning of forty characters: "


def record(cluster: Cluster, salt: bytes = SALT, model: str = "") -> Any:
    stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(cluster.channel)
    return stub.RecordRequests(trace_pb2.RecordRequestsRequest(salt=salt, model=model), metadata=SECRET)


async def listening(cluster: Cluster, **options: Any) -> Any:
    tap, before = cluster.app.observers.tap, len(cluster.app.observers.tap._listeners)
    call = record(cluster, **options)
    await until(lambda: len(tap._listeners) == before + 1)
    return call


async def ask(cluster: Cluster, text: str, **more: Any) -> int:
    """Returns the prompt's tokens."""
    answer = await cluster.openai.completions.create(model=MODEL, prompt=text, max_tokens=5, **more)
    tokens: int = answer.usage.prompt_tokens
    return tokens


async def test_what_is_recorded_is_a_trace_with_the_shared_prefixes(cluster: Cluster, tmp_path: Path) -> None:
    call = await listening(cluster)
    cluster.says("hello")
    texts = (SHARED + "a?", SHARED + "and what else?", "x" * 40)
    lengths = [await ask(cluster, text, extra_headers={"x-tandem-priority": "batch"}) for text in texts]
    seen, path = Recorded(), tmp_path / "requests.jsonl"
    with path.open("w") as file:
        for _ in range(3):
            note(await call.read(), seen, file)
    call.cancel()
    trace = read_trace(path, jitter=False)
    assert (len(trace), seen.unanswered, seen.lost) == (3, 0, 0)
    assert trace.prompt_tokens.tolist() == lengths
    assert trace.label_of(0) == ("batch", "")
    assert trace.prefixes is not None
    first, second, third = (trace.prefixes.of(index).tolist() for index in range(3))
    shared = len(SHARED.encode()) // trace.prefixes.block_tokens
    assert first[: shared - 1] == second[: shared - 1]
    assert not set(third) & {*first, *second}
    assert "beginning" not in path.read_text()


async def test_what_a_request_took_is_recorded(cluster: Cluster, tmp_path: Path) -> None:
    call = await listening(cluster)
    cluster.prefill.behaviour.token_delay_s, cluster.decode.behaviour.token_delay_s = PROMPT_S, TOKEN_S
    cluster.says("hello")
    began_s = time.monotonic()
    await ask(cluster, "x" * 40)
    took_s = time.monotonic() - began_s
    logged = await call.read()
    call.cancel()
    assert logged.output_tokens == 5
    assert logged.ttft_s >= PROMPT_S
    assert logged.decode_s >= 3 * TOKEN_S
    assert logged.ttft_s + logged.decode_s <= took_s
    with (path := tmp_path / "requests.jsonl").open("w") as file:
        note(logged, Recorded(), file)
    measured = read_trace(path, jitter=False).measured
    assert measured is not None
    assert (measured.ttft_s[0], measured.decode_s[0]) == pytest.approx((logged.ttft_s, logged.decode_s), abs=1e-6)
    assert measured.began_s == pytest.approx(logged.received_unix_s, abs=1e-6)


def test_routers_of_earlier_releases_do_not_tell_what_a_request_took(tmp_path: Path) -> None:
    logged = trace_pb2.LoggedRequest(received_unix_s=1e9, prompt_tokens=5, output_tokens=2, block_tokens=16)
    with (path := tmp_path / "requests.jsonl").open("w") as file:
        note(logged, Recorded(), file)
    assert "ttft_s" not in path.read_text()
    assert read_trace(path, jitter=False).measured is None


async def test_two_recordings_have_nothing_in_common_to_match_prompts_by(cluster: Cluster) -> None:
    first, second = await listening(cluster), await listening(cluster, salt=b"another salt of 16 or more")
    await ask(cluster, "x" * 64)
    hashes = [set((await call.read()).block_hashes) for call in (first, second)]
    assert all(hashes)
    assert not hashes[0] & hashes[1]
    for call in (first, second):
        call.cancel()
    await until(lambda: not cluster.app.observers.tap._listeners)


async def test_a_request_that_was_not_answered_is_told_but_is_no_row(cluster: Cluster, tmp_path: Path) -> None:
    call = await listening(cluster)
    cluster.prefill.behaviour.hold_prefills = True
    client = asyncio.create_task(ask(cluster, "hold this"))
    await until(lambda: bool(cluster.prefill.frames("prefill")))
    client.cancel()
    await asyncio.wait([client])
    logged = await call.read()
    seen = Recorded()
    with (tmp_path / "none.jsonl").open("w") as file:
        note(logged, seen, file)
    call.cancel()
    assert (logged.output_tokens, seen.requests, seen.unanswered) == (0, 0, 1)
    assert not logged.HasField("ttft_s")
    assert not logged.HasField("decode_s")


@pytest.mark.parametrize("salt", [b"", b"short", b"x" * 65])
async def test_a_salt_that_hides_nothing_is_refused(cluster: Cluster, salt: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await record(cluster, salt=salt).read()
    assert "expected 16 to 64 bytes" in (caught.value.details() or "")


async def test_there_may_be_so_many_recordings_at_once(cluster: Cluster) -> None:
    calls = [await listening(cluster) for _ in range(MAX_LISTENERS)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await record(cluster).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    await until(lambda: not cluster.app.observers.tap._listeners)


async def test_only_the_controller_may_record(cluster: Cluster) -> None:
    stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(cluster.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.RecordRequests(trace_pb2.RecordRequestsRequest(salt=SALT)).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
