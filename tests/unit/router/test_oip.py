"""The Open Inference Protocol on the gRPC port: requests of general inference clients and their answers."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest

from router.edge.keyed_grpc import KeyedCalls
from router.edge.limits.grpc_calls import CallLimit
from router.edge.oip import OipEdge
from router.testing.stub_worker import until
from tandem.config.router import RouterSpec
from tandem.errors import ContextExceeded, InputError, ModelNotFound, NotFound, UnsupportedField
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from tandem.rpc.grpc_errors import error_from_rpc
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
Tensor = oip.ModelInferRequest.InferInputTensor


@pytest.fixture
def stub(bare: Cluster) -> oip_grpc.GRPCInferenceServiceAsyncStub:
    return oip_grpc.GRPCInferenceServiceStub(bare.channel)


def param(value: object) -> oip.InferParameter:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return oip.InferParameter(**{kinds[type(value)]: value})  # type: ignore[arg-type]


def bytes_tensor(name: str, element: bytes) -> Tensor:
    contents = oip.InferTensorContents(bytes_contents=[element])
    return Tensor(name=name, datatype="BYTES", shape=[1], contents=contents)


def text_request(text: str = "Hi", **parameters: object) -> oip.ModelInferRequest:
    return oip.ModelInferRequest(
        model_name=MODEL,
        id="mine",
        inputs=[bytes_tensor("text_input", text.encode())],
        parameters={name: param(value) for name, value in parameters.items()},
    )


def ids_request(ids: list[int], datatype: str = "INT64", **contents: Any) -> oip.ModelInferRequest:
    contents = contents or {"int64_contents": ids}
    tensor = Tensor(name="input_ids", datatype=datatype, shape=[len(ids)], contents=oip.InferTensorContents(**contents))
    return oip.ModelInferRequest(model_name=MODEL, inputs=[tensor])


def outputs(reply: oip.ModelInferResponse) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for tensor in reply.outputs:
        if tensor.datatype == "BYTES":
            found[tensor.name] = tensor.contents.bytes_contents[0].decode()
        else:
            found[tensor.name] = list(tensor.contents.int_contents)
            assert list(tensor.shape) == [len(found[tensor.name])]
    return found


async def test_liveness_readiness_and_metadata(bare: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub) -> None:
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL))).ready
    await bare.list_workers(bare.prefill, bare.decode)
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL, version="1"))).ready
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL, version="2"))).ready
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name="nope"))).ready
    server = await stub.ServerMetadata(oip.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == (
        "tandem",
        ["model_stream_infer", "model_configuration", "statistics"],
    )
    model = await stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL))
    assert (model.name, list(model.versions), model.platform) == (MODEL, ["1"], "tandem")
    assert {tensor.name for tensor in model.inputs} >= {"text_input", "input_ids"}
    assert {tensor.name for tensor in model.outputs} >= {"text_output", "output_ids"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelMetadata(oip.ModelMetadataRequest(name="nope"))
    assert isinstance(error_from_rpc(caught.value), ModelNotFound)


async def test_text_is_answered_with_text(cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub) -> None:
    tokens = cluster.says("Hello €")
    reply = await stub.ModelInfer(text_request(temperature=0.5, max_tokens=20, seed=7, top_k=3, ignore_eos=True))
    assert outputs(reply) == {"text_output": "Hello €", "output_ids": tokens, "finish_reason": "length"}
    assert (reply.model_name, reply.model_version, reply.id) == (MODEL, "1", "mine")
    [work] = cluster.decode.works.values()
    sampling = work.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.top_k) == (0.5, 20, 7, 3)
    assert not sampling.stop_token_ids


async def test_sampling_may_be_a_json_tensor(cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub) -> None:
    cluster.says("one STOP two")
    request = text_request()
    request.inputs.append(bytes_tensor("sampling_parameters", json.dumps({"stop": ["STOP"], "top_p": 0.5}).encode()))
    assert outputs(await stub.ModelInfer(request))["text_output"] == "one "


@pytest.mark.parametrize("is_raw", [False, True])
async def test_text_with_a_batch_dimension_of_one_is_taken_as_one_text(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub, is_raw: bool
) -> None:
    cluster.says("Hello")
    request = text_request()
    request.inputs[0].shape[:] = [1, 1]
    if is_raw:
        request.inputs[0].ClearField("contents")
        request.raw_input_contents.append(struct.pack("<I", 2) + b"Hi")
    reply = await stub.ModelInfer(request)
    texts = {output.name: list(output.shape) for output in reply.outputs}
    assert texts["text_output"] == [1]
    [work] = cluster.decode.works.values()
    prompt = list(work.prompt)
    await stub.ModelInfer(text_request())
    assert [list(each.prompt) for each in cluster.decode.works.values()] == [prompt] * 2


async def test_the_configuration_has_the_tensors_of_the_metadata(stub: oip_grpc.GRPCInferenceServiceAsyncStub) -> None:
    config = (await stub.ModelConfig(oip.ModelConfigRequest(name=MODEL, version="1"))).config
    metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL))
    types = {"BYTES": oip.TYPE_STRING, "INT32": oip.TYPE_INT32, "INT64": oip.TYPE_INT64}
    told = [
        *((each.name, each.data_type, list(each.dims)) for each in config.input),
        *((each.name, each.data_type, list(each.dims)) for each in config.output),
    ]
    assert told == [
        (each.name, types[each.datatype], list(each.shape)) for each in [*metadata.inputs, *metadata.outputs]
    ]
    assert (config.name, config.platform, config.backend, config.max_batch_size) == (MODEL, "tandem", "tandem", 0)
    assert all(each.optional for each in config.input)
    assert config.model_transaction_policy.decoupled


async def test_statistics_count_what_was_answered_and_nothing_that_was_cancelled(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub
) -> None:
    started_s = time.time()
    [before] = (await stub.ModelStatistics(oip.ModelStatisticsRequest())).model_stats
    assert before == oip.ModelStatistics(name=MODEL, version="1")
    for _ in range(2):
        await stub.ModelInfer(text_request())
    cluster.prefill.behaviour.hold_prefills = True
    cancelled = stub.ModelInfer(text_request())
    held = asyncio.ensure_future(cancelled)
    await until(lambda: len(cluster.prefill.frames("prefill")) == 3)
    cancelled.cancel()
    await asyncio.gather(held, return_exceptions=True)
    await until(lambda: cluster.ends("cancelled") == 1)
    [counted] = (await stub.ModelStatistics(oip.ModelStatisticsRequest(name=MODEL, version="1"))).model_stats
    stats = counted.inference_stats
    assert counted.inference_count == stats.success.count == stats.queue.count == stats.compute_infer.count == 2
    assert 0 < stats.compute_infer.ns < stats.success.ns
    assert stats.success.ns == pytest.approx(stats.queue.ns + stats.compute_infer.ns, abs=4)
    assert stats.fail == oip.StatisticDuration()
    assert round(1000 * started_s) <= counted.last_inference <= round(1000 * time.time())


class TestShortQueue:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, queue_timeout_s=0.3)

    async def test_statistics_count_what_was_refused_with_its_time_until_then(
        self, bare: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ModelInfer(text_request())
        assert bare.ends("rejected") == 1
        [counted] = (await stub.ModelStatistics(oip.ModelStatisticsRequest(name=MODEL))).model_stats
        assert (counted.inference_count, counted.inference_stats.fail.count) == (0, 1)
        assert counted.inference_stats.fail.ns >= 0.3e9
        assert counted.last_inference > 0


async def test_configuration_and_statistics_of_an_unknown_model_or_version_are_refused(
    stub: oip_grpc.GRPCInferenceServiceAsyncStub,
) -> None:
    for name, version, error in (("nope", "", ModelNotFound), (MODEL, "2", NotFound)):
        for ask in (
            stub.ModelConfig(oip.ModelConfigRequest(name=name, version=version)),
            stub.ModelStatistics(oip.ModelStatisticsRequest(name=name, version=version)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask
            assert isinstance(error_from_rpc(caught.value), error)


@pytest.mark.parametrize(
    ("datatype", "contents"), [("INT64", "int64_contents"), ("INT32", "int_contents"), ("UINT32", "uint_contents")]
)
async def test_token_ids_of_every_width(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub, datatype: str, contents: str
) -> None:
    await stub.ModelInfer(ids_request([70, 71, 72], datatype, **{contents: [70, 71, 72]}))
    [work] = cluster.decode.works.values()
    assert list(work.prompt) == [70, 71, 72]


async def test_raw_tensors_are_answered_with_raw_tensors(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub
) -> None:
    tokens = cluster.says("fine")
    request = oip.ModelInferRequest(
        model_name=MODEL,
        inputs=[Tensor(name="input_ids", datatype="INT32", shape=[1, 3])],
        outputs=[oip.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("output_ids", "text_output")],
        raw_input_contents=[np.asarray([70, 71, 72], "<i4").tobytes()],
    )
    reply = await stub.ModelInfer(request)
    ids, text = reply.raw_output_contents
    assert np.frombuffer(ids, "<i4").tolist() == tokens
    assert (struct.unpack_from("<I", text)[0], text[4:]) == (4, b"fine")
    assert [output.name for output in reply.outputs] == ["output_ids", "text_output"]


async def test_a_stream_answers_its_requests_in_order_and_survives_a_bad_one(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub
) -> None:
    tokens = cluster.says("Grüße")

    async def requests() -> AsyncIterator[oip.ModelInferRequest]:
        first = text_request(triton_enable_empty_final_response=True)
        for number, request in enumerate((first, text_request(temperature=-1.0), text_request())):
            request.id = str(number)
            yield request

    replies = [reply async for reply in stub.ModelStreamInfer(requests())]
    for number in (0, 2):
        own = [reply.infer_response for reply in replies if reply.infer_response.id == str(number)]
        assert "".join(outputs(reply)["text_output"] for reply in own) == "Grüße"
        assert [token for reply in own for token in outputs(reply)["output_ids"]] == tokens
        finals = [reply.parameters["triton_final_response"].bool_param for reply in own]
        assert finals == [False] * (len(own) - 1) + [True]
        assert outputs(own[-1])["finish_reason"] == "length"
    [failed] = [reply for reply in replies if reply.error_message]
    assert failed.infer_response.id == "1"
    assert "temperature" in failed.error_message


async def test_a_disconnect_cancels_the_request(cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    one, several = stub.ModelInfer(text_request()), stub.ModelStreamInfer(iter([text_request()]))
    unary = asyncio.ensure_future(one)
    stream = asyncio.ensure_future(several.read())
    await until(lambda: len(cluster.prefill.frames("prefill")) == 2)
    for call in (one, several):
        call.cancel()
    await asyncio.gather(unary, stream, return_exceptions=True)
    await until(lambda: cluster.ends("cancelled") == 2)
    await cluster.settled()


async def test_an_idle_stream_does_not_count_as_a_running_call(cluster: Cluster) -> None:
    limit = CallLimit(1)
    release = asyncio.Event()

    async def nothing() -> AsyncIterator[oip.ModelInferRequest]:
        await release.wait()
        return
        yield

    edge = OipEdge(cluster.app.service, limit, cast(KeyedCalls, None), lambda model: oip.ModelStatistics())
    context = SimpleNamespace(invocation_metadata=lambda: ())
    idle = asyncio.ensure_future(anext(edge.ModelStreamInfer(nothing(), context), None))
    await asyncio.sleep(0.05)
    with limit:
        release.set()
    assert await idle is None


BAD: list[tuple[oip.ModelInferRequest, type[Exception], str]] = [
    (oip.ModelInferRequest(model_name=MODEL), InputError, "inputs"),
    (oip.ModelInferRequest(model_name="nope", inputs=text_request().inputs), ModelNotFound, "model"),
    (oip.ModelInferRequest(model_name=MODEL, model_version="9"), NotFound, "model_version"),
    (oip.ModelInferRequest(model_name=MODEL, inputs=[bytes_tensor("image", b"")]), InputError, "inputs"),
    (oip.ModelInferRequest(model_name=MODEL, inputs=[*text_request().inputs] * 2), InputError, "inputs"),
    (text_request(""), InputError, "prompt"),
    (oip.ModelInferRequest(model_name=MODEL, inputs=[bytes_tensor("text_input", b"\xff")]), InputError, "text_input"),
    (
        oip.ModelInferRequest(
            model_name=MODEL, inputs=[Tensor(name="text_input", datatype="BYTES", shape=[7] * 10_000)]
        ),
        InputError,
        "text_input",
    ),
    (ids_request([-1]), InputError, "prompt"),
    (ids_request([70] * 600), ContextExceeded, "prompt"),
    (ids_request([1, 2], "FP32"), InputError, "input_ids"),
    (ids_request([1, 2], int64_contents=[1]), InputError, "input_ids"),
    (text_request(temperature="hot"), InputError, "temperature"),
    (text_request(temperature=float("nan")), InputError, "temperature"),
    (text_request(frobnicate=1), InputError, "frobnicate"),
    (text_request(n=2), UnsupportedField, "parameters.n"),
    (text_request(stream=True), UnsupportedField, "parameters.stream"),
    (
        oip.ModelInferRequest(
            model_name=MODEL,
            inputs=[Tensor(name="text_input", datatype="BYTES", shape=[1])],
            raw_input_contents=[b"\xff"],
        ),
        InputError,
        "text_input",
    ),
    (
        oip.ModelInferRequest(
            model_name=MODEL,
            inputs=[Tensor(name="input_ids", datatype="INT32", shape=[2**40])],
            raw_input_contents=[b"x"],
        ),
        InputError,
        "input_ids",
    ),
    (
        oip.ModelInferRequest(model_name=MODEL, inputs=text_request().inputs, raw_input_contents=[b"", b""]),
        InputError,
        "raw_input_contents",
    ),
    (
        oip.ModelInferRequest(
            model_name=MODEL, inputs=[*text_request().inputs, bytes_tensor("sampling_parameters", b"[" * 5000)]
        ),
        InputError,
        "sampling_parameters",
    ),
    (
        oip.ModelInferRequest(
            model_name=MODEL,
            inputs=text_request().inputs,
            outputs=[oip.ModelInferRequest.InferRequestedOutputTensor(name="x")],
        ),
        InputError,
        "outputs",
    ),
]


async def test_bad_requests_are_refused_with_their_field(
    cluster: Cluster, stub: oip_grpc.GRPCInferenceServiceAsyncStub
) -> None:
    for request, kind, field in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        typed = error_from_rpc(caught.value)
        assert len(caught.value.details() or "") < 1000
        assert (type(typed), getattr(typed, "field", None)) == (kind, field), caught.value.details()
    assert cluster.ends("rejected") == len(BAD)
    assert not cluster.decode.received
