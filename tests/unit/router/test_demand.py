"""What a router tells its controller of the load, for the autoscaler."""

from __future__ import annotations

import grpc
import pytest

from cluster.control.router_traces import RouterTraces
from cluster.control.scaling.autoscaling import demand_of
from router.policies.pace import BATCH_SIZES
from tandem.config.router import Disaggregation, RouterSpec
from tandem.v1 import trace_pb2
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
SECRET = "only-the-controller-knows"


def traces(cluster: Cluster, secret: str = SECRET) -> RouterTraces:
    return RouterTraces({"router-0": f"127.0.0.1:{cluster.app.grpc_port}"}, secret)


async def demand(cluster: Cluster) -> trace_pb2.ModelDemand:
    return demand_of((await traces(cluster).demands())["router-0"], MODEL)


async def ask(cluster: Cluster, priority: str = "interactive", timeout_s: float = 60.0) -> None:
    headers = {"x-tandem-priority": priority, "x-request-timeout-s": f"{timeout_s:g}"}
    await cluster.openai.completions.create(model=MODEL, prompt=list(range(3, 43)), max_tokens=4, extra_headers=headers)


async def test_requests_are_counted_from_their_coming_to_their_end(cluster: Cluster) -> None:
    cluster.says("one two three")
    assert await demand(cluster) == trace_pb2.ModelDemand(model=MODEL), "no request came yet"
    for _ in range(3):
        await ask(cluster)
    found = await demand(cluster)
    assert (found.requests, found.prompt_tokens, found.first_tokens, found.finished) == (3, 120, 3, 3)
    assert (found.prefilled_tokens, found.judged, found.missed_ttft, found.missed_tpot) == (120, 3, 0, 0)
    assert found.local_tokens == 0
    assert found.answer_tokens >= 3
    assert found.ttft_s > 0
    assert found.queued_tokens == 0
    assert len(found.prefill.tpot_s) == len(found.decode.tpot_s) == len(BATCH_SIZES)
    assert found.prefill.prefill_s_per_token > 0


class TestLocalPrompts:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.NEVER)

    async def test_what_decode_workers_computed_is_counted(self, cluster: Cluster) -> None:
        cluster.says("one two three")
        cluster.decode.behaviour.cached_tokens = 16
        await ask(cluster)
        found = await demand(cluster)
        assert (found.prefilled_tokens, found.cached_tokens, found.local_tokens) == (40, 16, 24)


async def test_only_the_controller_is_told(cluster: Cluster) -> None:
    assert await traces(cluster, "a guess").demands() == {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.app.grpc_port}") as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/tandem.v1.Traces/GetDemand")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(b"")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
