"""Streams that a key keeps open, and calls without one."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from router.edge import grpc_server as edge
from router.testing.stub_worker import until
from tandem.config.router import RouterSpec
from tandem.errors import OverloadedError, Unauthenticated
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

STREAMS_OF_ONE = 4
ANSWERS_OF_ONE = 3


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> RouterSpec:
    monkeypatch.setattr(edge, "MAX_STREAMS", STREAMS_OF_ONE * edge.SHARE_OF_ONE)
    monkeypatch.setattr(edge, "MAX_GENERATE_CALLS", round(ANSWERS_OF_ONE / edge.CALLS_OF_ONE))
    return RouterSpec(http_port=0, grpc_port=0)


def streams(cluster: Cluster, metadata: Any, count: int) -> list[Any]:
    method: Any = cluster.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    return [method(metadata=metadata) for _ in range(count)]


async def end_of(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async with asyncio.timeout(60):
            await call.read()
    return error_from_rpc(ended.value)


async def test_the_idle_streams_of_one_key_leave_places_to_others(cluster: Cluster, keys: Keys) -> None:
    idle = streams(cluster, keys.metadata("acme"), 2 * edge.MAX_STREAMS)
    ends = [asyncio.create_task(end_of(call)) for call in idle]
    async with asyncio.timeout(60):
        while sum(each.done() for each in ends) < len(idle) - STREAMS_OF_ONE:
            await asyncio.sleep(0.01)
    errors = [each.result() for each in ends if each.done()]
    assert all(isinstance(error, OverloadedError) for error in errors)
    assert {str(error) for error in errors} == {
        f"expected at most {STREAMS_OF_ONE} open streams of one key or address; end some, or retry later"
    }
    [other] = streams(cluster, keys.metadata("rival"), 1)
    await other.write(oip.ModelInferRequest(model_name="nope", id="1").SerializeToString())
    assert oip.ModelStreamInferResponse.FromString(await other.read()).infer_response.id == "1"
    other.cancel()
    for call in idle:
        call.cancel()
    await asyncio.wait(ends)


async def test_answers_under_way_to_one_key_leave_places_to_others(cluster: Cluster, keys: Keys) -> None:
    cluster.decode.behaviour.hold_prefills = cluster.prefill.behaviour.hold_prefills = True

    def ask(tenant: str) -> Any:
        return cluster.inference.Generate(pb.GenerateRequest(prompt="Hi"), metadata=keys.metadata(tenant))

    held = [ask("acme") for _ in range(ANSWERS_OF_ONE)]
    await until(lambda: cluster.app.dispatcher.active == ANSWERS_OF_ONE)
    assert str(await end_of(ask("acme"))) == (
        f"expected at most {ANSWERS_OF_ONE} concurrent calls of one key or address; end some, or retry later"
    )
    held.append(ask("rival"))
    await until(lambda: cluster.app.dispatcher.active == ANSWERS_OF_ONE + 1)
    for call in held:
        call.cancel()
    await cluster.settled()


async def test_a_call_without_a_key_is_refused_before_its_message(cluster: Cluster, keys: Keys) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        async with asyncio.timeout(60):
            assert isinstance(await end_of(streams(cluster, metadata, 1)[0]), Unauthenticated)
