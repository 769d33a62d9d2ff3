"""Requests with an idempotency key over gRPC, as test_idempotency over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from router.testing.stub_worker import until
from tandem.config.auth import AuthSpec, LimitsSpec
from tandem.config.router import Disaggregation, IdempotencySpec, RouterSpec
from tandem.errors import IdempotencyKeyReused, InputError, NoWorker, RateLimited, TandemError, UnavailableError
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
KEY = "idempotency-key"
BIAS = {each: each / 100 for each in range(50)}
REQUEST = pb.GenerateRequest(prompt="Hi", sampling=pb.SamplingParams(logit_bias=BIAS))
Call = asyncio.Task[tuple[list[pb.GenerateResponse], bool]]


@pytest.fixture
def grace_s() -> float:
    return 600.0


@pytest.fixture
def spec(grace_s: float) -> RouterSpec:
    return RouterSpec(
        http_port=0,
        grpc_port=0,
        disaggregation=Disaggregation.ALWAYS,
        queue_timeout_s=1.0,
        max_migrations=0,
        idempotency=IdempotencySpec(grace_s=grace_s, keep_s=600.0),
    )


async def _generate(
    cluster: Cluster, request: pb.GenerateRequest, metadata: tuple[tuple[str, str], ...]
) -> tuple[list[pb.GenerateResponse], bool]:
    """The messages, and whether they are those of an earlier call. Raises the TandemError of its status."""
    call = cluster.inference.Generate(request, metadata=metadata)
    try:
        messages = [each async for each in call]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return messages, ("idempotency-replayed", "true") in [*(await call.trailing_metadata() or ())]


def generate(
    cluster: Cluster, request: pb.GenerateRequest = REQUEST, key: str = "order 66", *more: tuple[str, str]
) -> Call:
    return asyncio.create_task(_generate(cluster, request, ((KEY, key), *more)))


def prefills(cluster: Cluster) -> int:
    return len(cluster.prefill.frames("prefill"))


async def begun(cluster: Cluster) -> None:
    await until(lambda: prefills(cluster) == 1)


async def failure(call: Call) -> TandemError:
    with pytest.raises(TandemError) as caught:
        await call
    return caught.value


def outcomes(cluster: Cluster, api: str = "grpc") -> dict[str, float]:
    """Those that were counted."""
    start = f'tandem_keyed_requests_total{{api="{api}",outcome="'
    lines = [
        line.removeprefix(start)
        for line in cluster.app.metrics.render().decode().splitlines()
        if line.startswith(start)
    ]
    found = {line.split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return {outcome: count for outcome, count in found.items() if count}


async def test_a_repeat_of_a_done_request_gets_the_same_messages(cluster: Cluster) -> None:
    tokens = cluster.says("Once only.")
    first, is_replayed = await generate(cluster)
    assert not is_replayed
    assert [token for each in first for token in each.chunk.token_ids] == tokens
    same = pb.GenerateRequest(prompt="Hi", sampling=pb.SamplingParams(logit_bias=dict(reversed(BIAS.items()))))
    for request in (REQUEST, same):
        assert await generate(cluster, request) == (first, True)
    assert prefills(cluster) == 1
    assert outcomes(cluster) == {"run": 1, "replayed": 2}


async def test_repeats_of_a_request_under_way_follow_it_to_its_end(cluster: Cluster) -> None:
    cluster.says("One, two, three, four, five.")
    cluster.decode.behaviour.token_delay_s = 0.2
    first = generate(cluster)
    await begun(cluster)
    others = [generate(cluster) for _ in range(3)]
    await until(lambda: outcomes(cluster).get("attached") == 3)
    cluster.decode.behaviour.token_delay_s = 0.0
    messages, _ = await first
    assert [await each for each in others] == [(messages, True)] * 3
    assert prefills(cluster) == 1
    assert outcomes(cluster) == {"run": 1, "attached": 3}
    await cluster.settled()


async def test_a_request_goes_on_without_its_client_and_a_retry_finds_it(cluster: Cluster) -> None:
    cluster.says("One, two, three, four, five.")
    cluster.decode.behaviour.token_delay_s = 0.02
    first = generate(cluster)
    await begun(cluster)
    first.cancel()
    await asyncio.wait([first])
    messages, is_replayed = await generate(cluster)
    assert is_replayed
    assert messages[-1].HasField("finished")
    assert prefills(cluster) == 1
    assert not cluster.decode.cancelled


@pytest.mark.parametrize("grace_s", [0.3])
async def test_a_request_that_no_client_waits_for_is_cancelled_after_the_grace(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    first = generate(cluster)
    await begun(cluster)
    first.cancel()
    await until(lambda: cluster.app.dispatcher.active == 0)
    assert cluster.ends("cancelled") == 1


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_key_with_another_request_or_api_is_refused(cluster: Cluster, is_done: bool) -> None:
    if not is_done:
        cluster.decode.behaviour.token_delay_s = 2.0
    first = generate(cluster)
    await begun(cluster)
    if is_done:
        await first
    error = await failure(generate(cluster, pb.GenerateRequest(prompt="Ho")))
    assert (type(error), error.field) == (IdempotencyKeyReused, KEY)
    answer = await cluster.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers={KEY: "order 66"}
    )
    assert answer.status_code == 422
    assert first.done() == is_done
    await first
    assert prefills(cluster) == 1
    assert (outcomes(cluster)["conflict"], outcomes(cluster, "http")) == (1, {"conflict": 1})


async def test_an_invalid_key_is_refused_by_name(cluster: Cluster) -> None:
    error = await failure(generate(cluster, key="x" * 256))
    assert (type(error), error.field) == (InputError, KEY)
    assert prefills(cluster) == 0


async def test_a_refusal_that_a_retry_cannot_help_is_repeated(cluster: Cluster) -> None:
    bad = pb.GenerateRequest(prompt="Hi", sampling=pb.SamplingParams(temperature=-1))
    errors = [await failure(generate(cluster, bad)) for _ in range(2)]
    assert [error.field for error in errors] == ["temperature", "temperature"]
    assert outcomes(cluster) == {"run": 1, "replayed": 1}


async def test_a_failure_that_a_retry_may_help_frees_the_key(bare: Cluster) -> None:
    assert isinstance(await failure(generate(bare)), NoWorker)
    await bare.list_workers(bare.prefill, bare.decode)
    _, is_replayed = await generate(bare)
    assert not is_replayed
    assert outcomes(bare) == {"run": 2}


async def test_the_router_ends_keyed_requests_when_it_stops(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    first = generate(cluster)
    await begun(cluster)
    closing = asyncio.create_task(cluster.app.close())
    assert isinstance(await failure(first), UnavailableError)
    await closing


async def unsent(asked: oip.ModelInferRequest) -> AsyncIterator[oip.ModelInferRequest]:
    """gRPC's client names a refusal that comes while it writes an internal error."""
    await asyncio.Event().wait()
    yield asked


async def test_model_infer_takes_a_key_and_model_stream_infer_refuses_it(cluster: Cluster) -> None:
    cluster.says("Once only.")
    tensor = oip.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=oip.InferTensorContents(bytes_contents=[b"Hi"])
    )
    asked, stub = oip.ModelInferRequest(model_name=MODEL, inputs=[tensor]), GRPCInferenceServiceStub(cluster.channel)
    answers = [await stub.ModelInfer(asked, metadata=((KEY, "k"),)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert prefills(cluster) == 1
    assert outcomes(cluster) == {"run": 1, "replayed": 1}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [each async for each in stub.ModelStreamInfer(unsent(asked), metadata=((KEY, "k"),))]
    assert error_from_rpc(refused.value).field == KEY


class TestCallers:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Keys:
        keys = Keys(tmp_path / "keys.yaml")
        keys.add("acme")
        keys.add("other")
        return keys

    @pytest.fixture
    def auth(self, keys: Keys, tmp_path: Path) -> AuthSpec:
        return AuthSpec(keys_file=str(keys.path), audit_log=str(tmp_path / "audit.log"))

    async def test_a_key_of_another_tenant_is_another_key(self, cluster: Cluster, keys: Keys) -> None:
        for tenant, is_replayed in (("acme", False), ("other", False), ("acme", True)):
            assert (await generate(cluster, REQUEST, "k", *keys.metadata(tenant)))[1] == is_replayed

    async def test_a_request_counts_once_and_each_repeat_once_also_one_that_is_refused(
        self, cluster: Cluster, keys: Keys
    ) -> None:
        keys.add("few", limits=LimitsSpec(requests_per_minute=3))
        metadata = keys.metadata("few")
        async with asyncio.timeout(60):
            while (await cluster.http.get("/v1/models", headers=dict(metadata))).status_code == 401:
                await asyncio.sleep(0.01)
        await generate(cluster, REQUEST, "k", *metadata)
        other = pb.GenerateRequest(prompt="Ho")
        errors = [await failure(generate(cluster, other, "k", *metadata)) for _ in range(3)]
        assert [type(error) for error in errors] == [IdempotencyKeyReused, IdempotencyKeyReused, RateLimited]

    async def test_the_audit_log_tells_the_end_of_a_request_whose_client_left(
        self, cluster: Cluster, keys: Keys, tmp_path: Path
    ) -> None:
        tokens = cluster.says("One, two, three.")
        cluster.decode.behaviour.token_delay_s = 0.005
        first = generate(cluster, REQUEST, "k", *keys.metadata("acme"))
        await begun(cluster)
        first.cancel()
        audit = tmp_path / "audit.log"
        await until(lambda: audit.read_text().count("\n") == 1)
        await generate(cluster, REQUEST, "k", *keys.metadata("acme"))
        await until(lambda: audit.read_text().count("\n") == 2)
        ran, repeated = (json.loads(line) for line in audit.read_text().splitlines())
        assert (ran["outcome"], ran["completion_tokens"]) == ("finished", len(tokens))
        assert (repeated["outcome"], repeated["completion_tokens"]) == ("ok", 0)
