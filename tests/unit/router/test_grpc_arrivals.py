"""Calls whose messages do not come: 17 connections of them shut the gRPC port for every client, and each may hold a
message of the largest size without its last byte."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.edge import grpc_server as edge
from router.edge.limits import grpc as limits
from router.edge.limits import grpc_arrivals
from router.edge.limits.bodies import EXEMPT_BYTES
from router.edge.limits.grpc_calls import CallLimit
from router.testing.stub_worker import until
from tandem.config.router import RouterSpec
from tandem.errors import DeadlineExceeded, InputError, OverloadedError, Unauthenticated
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

LONG_S = 60.0  # no call ends by itself within a test
BODY_BYTES = 1 << 20
BILLED = BODY_BYTES - EXEMPT_BYTES
CALLS = 120
STREAMS_OF_ONE = 4
GET_DEMAND = "/tandem.v1.Traces/GetDemand"
GENERATE, LIST_MODELS = "/tandem.v1.Inference/Generate", "/tandem.v1.Inference/ListModels"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture
def client_timeout_s() -> float:
    return LONG_S


@pytest.fixture
def slow_after_s() -> float:
    return 0.05


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, client_timeout_s: float, slow_after_s: float) -> RouterSpec:
    monkeypatch.setattr(edge, "MAX_OPEN_CALLS", 150)
    monkeypatch.setattr(edge, "MAX_CALLS", CALLS)
    monkeypatch.setattr(edge, "MAX_STREAMS", 4 * STREAMS_OF_ONE)
    monkeypatch.setattr(grpc_arrivals, "SLOW_AFTER_S", slow_after_s)
    monkeypatch.setattr(edge, "PUBLIC_MESSAGE_S", client_timeout_s)
    return RouterSpec(http_port=0, grpc_port=0, client_timeout_s=client_timeout_s, max_body_bytes=BODY_BYTES)


async def silent(cluster: Cluster, method: str, count: int = 1) -> list[Any]:
    """Calls that send their headers and no message, over a connection of their own."""
    address, own = f"127.0.0.1:{cluster.app.grpc_port}", (("grpc.use_local_subchannel_pool", 1),)
    channel: Any = grpc.aio.insecure_channel(address, own)
    await channel.channel_ready()
    return [channel.stream_stream(method)() for _ in range(count)]


async def end_of(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async with asyncio.timeout(LONG_S):
            await call.read()
    return error_from_rpc(ended.value)


def held_bytes(cluster: Cluster) -> int:
    return cluster.app.bodies.held_bytes


@pytest.mark.parametrize("slow_after_s", [LONG_S], ids=["none is slow yet"])
@pytest.mark.parametrize("method", [CHECK, WATCH, LIST_MODELS, GENERATE, INFER, GET_DEMAND])
async def test_calls_that_send_nothing_shut_no_other_out(cluster: Cluster, method: str) -> None:
    calls = [call for _ in range(2) for call in await silent(cluster, method, CALLS - 1)]
    ends = [asyncio.create_task(end_of(call)) for call in calls]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    health = health_pb2_grpc.HealthStub(cluster.channel)
    async with asyncio.timeout(LONG_S):
        assert (await cluster.inference.ListModels(pb.ListModelsRequest())).models
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    if method in (CHECK, WATCH, LIST_MODELS):
        await until(lambda: any("calls may wait for theirs" in str(each.result()) for each in ends if each.done()))
    early = [each.result() for each in ends if each.done()]
    assert all(isinstance(error, OverloadedError | Unauthenticated) for error in early), early
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("client_timeout_s", [1.0])
async def test_a_message_has_a_time_limit_that_the_error_names(cluster: Cluster) -> None:
    [call] = await silent(cluster, LIST_MODELS)
    error = await end_of(call)
    assert isinstance(error, DeadlineExceeded)
    assert "1 s of the call (router.client_timeout_s)" in str(error)
    [call] = await silent(cluster, CHECK)
    await call.done_writing()
    error = await end_of(call)
    assert isinstance(error, InputError)
    assert str(error) == "message: expected one, got none"


@pytest.mark.parametrize("client_timeout_s", [5.0])
async def test_a_message_that_arrives_slowly_is_billed_as_the_largest_body(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.app.bodies, "_max_bytes", 2 * BILLED)
    calls = await silent(cluster, GENERATE, 3)
    ends = [asyncio.create_task(end_of(call)) for call in calls]
    [refused], _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(refused.result(), OverloadedError)
    assert "the bodies that the router receives now hold" in str(refused.result())
    assert held_bytes(cluster) == 2 * BILLED
    body = b" " * (2 * EXEMPT_BYTES)
    assert (await cluster.http.post("/v1/completions", content=body)).status_code == 429
    assert {type(each) for each in await asyncio.gather(*ends)} == {OverloadedError, DeadlineExceeded}
    assert held_bytes(cluster) == 0


async def test_a_slow_message_that_comes_is_answered_and_holds_nothing(cluster: Cluster) -> None:
    cluster.says("well")
    [call] = await silent(cluster, GENERATE)
    await until(lambda: held_bytes(cluster) == BILLED)
    await call.write(pb.GenerateRequest(prompt="Hi").SerializeToString())
    assert pb.GenerateResponse.FromString(await call.read()).HasField("started")
    assert held_bytes(cluster) == 0
    call.cancel()


async def test_slow_messages_of_one_address_leave_most_of_the_budget_to_others(cluster: Cluster) -> None:
    most = grpc_arrivals.MAX_SLOW // 2
    calls = await silent(cluster, GENERATE, most + 1)
    ends = [asyncio.create_task(end_of(call)) for call in calls]
    [refused], _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert f"expected at most {most} messages that arrive slowly of one key or address" in str(refused.result())
    assert held_bytes(cluster) == most * BILLED
    for call in calls:
        call.cancel()
    await until(lambda: held_bytes(cluster) == 0)
    await asyncio.wait(ends)


async def test_an_idle_stream_ends_with_an_error_that_names_the_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_IDLE_S", 0.1)
    error = await end_of((await silent(cluster, INFER))[0])
    assert isinstance(error, DeadlineExceeded)
    assert "at least every 0.1 s" in str(error)


def test_what_one_caller_leaves_another_may_take() -> None:
    limit = CallLimit(3, 2, "open streams")
    for _ in range(2):
        limit.enter("one")
    with pytest.raises(OverloadedError, match="at most 2 open streams of one key or address"):
        limit.enter("one")
    limit.enter("other")
    with pytest.raises(OverloadedError, match="at most 3 open streams; retry later"):
        limit.enter("third")
    limit.leave("one")
    with limit.of("one"), pytest.raises(OverloadedError):
        limit.enter("one")
    limit.enter("one")
