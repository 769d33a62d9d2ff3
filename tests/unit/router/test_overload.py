"""Admission on the wire: what clients are told when there is no room or no time. Who is refused: test_core_queue.py."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from starlette.requests import Request
from starlette.types import Message

from router.edge.grpc import InferenceEdge
from router.edge.http import HttpEdge
from router.edge.keyed_grpc import KeyedCalls
from router.edge.limits.grpc_calls import CallLimit
from router.edge.limits.http import SCOPE_KEY
from router.edge.write_pauses import WritePauses
from router.requests import events as ev
from router.testing.stub_worker import until
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import DeadlineExceeded, InputError, OverloadedError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
PROMPT_TOKENS = 20
FAR_S = 600.0
FAR = {"x-request-timeout-s": f"{FAR_S:g}"}


def body(max_tokens: int = 1) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [70] * PROMPT_TOKENS, "max_tokens": max_tokens}


def post(cluster: Cluster, headers: dict[str, str], **kwargs: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(cluster.http.post("/v1/completions", json=body(**kwargs), headers=headers))


def generate(cluster: Cluster, headers: dict[str, str], timeout_s: float | None = None, max_tokens: int = 1) -> Any:
    request = pb.GenerateRequest(model=MODEL, sampling=pb.SamplingParams(max_tokens=max_tokens))
    request.token_ids.ids.extend([70] * PROMPT_TOKENS)
    return cluster.inference.Generate(request, metadata=tuple(headers.items()), timeout=timeout_s)


async def read(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def at_rest(cluster: Cluster) -> None:
    """No request is anywhere, and no worker has anything of one."""
    await cluster.settled()
    for worker in (cluster.prefill, cluster.decode):
        await until(lambda worker=worker: not worker.known)  # type: ignore[misc]


# ---- refusals


class TestContended:
    """While the router has all the work that it admits: many answers run, and its queue is full."""

    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, max_queued_requests=20, disaggregation=Disaggregation.NEVER)

    @pytest.fixture
    async def full(self, cluster: Cluster) -> AsyncIterator[Cluster]:
        cluster.decode.behaviour.hold_prefills = True
        clients = [post(cluster, {}) for _ in range(20)]
        await until(lambda: len(cluster.decode.frames("generate")) == 20, 20.0)
        await cluster.list_workers()  # what runs goes on
        clients += [post(cluster, {}) for _ in range(20)]
        await until(lambda: len(cluster.app.dispatcher.queue) == 20, 20.0)
        yield cluster
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def test_a_refusal_is_decided_in_the_turn_of_the_event_loop_that_read_its_request(
        self, full: Cluster
    ) -> None:
        """However much runs and waits: `send` runs the handler until it would wait for anything."""
        edge = HttpEdge(full.app.service, max_body_bytes=1 << 16)
        frames = len(full.decode.received)

        async def receive() -> Message:
            return {"type": "http.request", "body": json.dumps(body()).encode()}

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"request_id": "r", SCOPE_KEY: SimpleNamespace(when_lost=lambda call: None)}
        with pytest.raises(OverloadedError):
            edge.completions(Request(scope, receive)).send(None)
        call = InferenceEdge(full.app.service, CallLimit(1), cast(KeyedCalls, None), WritePauses())._generate(
            pb.GenerateRequest(prompt="Hi"), lambda name: None, None, None, ""
        )
        with pytest.raises(OverloadedError):
            call.asend(None).send(None)
        assert len(full.decode.received) == frames, "nor is admitted work placed meanwhile"


class TestFullQueue:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, max_queued_requests=2)

    async def test_a_refusal_says_when_to_come_back_over_http_and_grpc(self, bare: Cluster) -> None:
        waiting = [post(bare, {}) for _ in range(2)]
        await until(lambda: bare.app.dispatcher.active == 2)
        reply = await post(bare, {})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(generate(bare, {}))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_rpc(caught.value)
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        await bare.list_workers(bare.prefill, bare.decode)
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]
        await at_rest(bare)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tandem-priority", "royal"),
        ("x-tandem-tenant", ""),
        ("x-tandem-tenant", "a b"),
        ("x-tandem-tenant", "x" * 65),
        ("x-request-timeout-s", "0"),
        ("x-request-timeout-s", "-1"),
        ("x-request-timeout-s", "nan"),
        ("x-request-timeout-s", "inf"),
        ("x-request-timeout-s", "1e3"),
        ("x-request-timeout-s", "86401"),
        ("x-request-timeout-s", "soon"),
    ],
)
async def test_bad_terms_are_refused_by_name(cluster: Cluster, header: str, value: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        reply = await cluster.http.post(path, json={}, headers={header: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, header)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(cluster, {header: value}))
    error = error_from_rpc(caught.value)
    assert isinstance(error, InputError)
    assert error.field == header
    assert cluster.ends("rejected") == 4


# ---- deadlines


def stop_at(cluster: Cluster, stage: str) -> None:
    cluster.prefill.behaviour.hold_prefills = stage == "prefill"
    cluster.decode.behaviour.token_delay_s = 0.15 if stage == "decode" else 0.0
    cluster.says("a rather long answer")


async def reach_deadline(cluster: Cluster, at: Callable[[], bool], requests: int = 1) -> None:
    """The far deadline of the requests passes when `at` is true, which may take long on a slow machine."""
    await until(at)
    dispatcher, loop = cluster.app.dispatcher, asyncio.get_running_loop()
    timers = [*dispatcher._deadlines.items()]
    assert [FAR_S - 60 < timer.when() - loop.time() <= FAR_S for _, timer in timers] == [True] * requests
    for run, timer in timers:
        timer.cancel()
        dispatcher.core.on(run, ev.Expired())


async def test_a_deadline_ends_a_request_in_the_queue(bare: Cluster) -> None:
    started_s = time.monotonic()
    reply = await post(bare, {"x-request-timeout-s": "0.4"}, max_tokens=100)
    assert time.monotonic() - started_s > 0.3
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert bare.metric('tandem_requests_total{code="deadline_exceeded"') == 1
    await at_rest(bare)


async def test_a_deadline_ends_a_request_on_both_workers(cluster: Cluster) -> None:
    stop_at(cluster, "prefill")
    asked = post(cluster, FAR, max_tokens=100)
    await reach_deadline(cluster, lambda: bool(cluster.prefill.frames("prefill")))
    reply = await asked
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 1
    await until(lambda: bool(cluster.decode.cancelled and cluster.prefill.cancelled))
    await at_rest(cluster)


async def test_deadline_in_the_middle_of_a_stream_is_its_last_event(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    stream = body(max_tokens=100) | {"stream": True}
    asked = asyncio.create_task(cluster.http.post("/v1/completions", json=stream, headers=FAR))
    await reach_deadline(cluster, lambda: any(run.answer_tokens > 1 for run in cluster.app.dispatcher.running()))
    reply = await asked
    assert reply.status_code == 200
    assert '"code":"deadline_exceeded"' in reply.text.split("\n\n")[-2 if reply.text.endswith("\n\n") else -1]
    await at_rest(cluster)


async def test_grpc_deadline_is_the_requests(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    cluster.decode.behaviour.token_delay_s = 30
    await cluster.channel.channel_ready()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(cluster, {}, timeout_s=3.0, max_tokens=100))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: bool(cluster.decode.cancelled))
    await until(lambda: cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 1)
    await at_rest(cluster)


async def test_grpc_metadata_may_set_a_shorter_deadline(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    asked = asyncio.create_task(read(generate(cluster, FAR, timeout_s=2 * FAR_S, max_tokens=100)))
    await reach_deadline(cluster, lambda: bool(cluster.decode.frames("join")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked
    assert isinstance(error_from_rpc(caught.value), DeadlineExceeded)
    await at_rest(cluster)


async def test_all_answers_of_a_request_end_at_its_deadline(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    several = body(max_tokens=100) | {"n": 3}
    asked = asyncio.create_task(cluster.http.post("/v1/completions", json=several, headers=FAR))
    await reach_deadline(cluster, lambda: len(cluster.decode.frames("join")) == 3, requests=3)
    reply = await asked
    assert reply.status_code == 504
    assert cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 3
    await at_rest(cluster)


async def test_a_request_in_time_leaves_no_timer(cluster: Cluster) -> None:
    reply = await post(cluster, {"x-request-timeout-s": "60"})
    assert reply.status_code == 200
    assert not cluster.app.dispatcher._deadlines
    await at_rest(cluster)
