"""Malicious requests: each is refused fast and leaves no memory behind, and the next good one is answered."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import struct_pb2

from router.edge.controller_api import SECRET_KEY
from router.testing.bodies import CHAT_HEAD, HEAD, items, multiplying_bodies
from tandem.config.router import RouterSpec
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tandem.v1 import inference_pb2 as pb
from tandem.vllm_api import inference_pb2 as vllm_pb2
from tests.unit.router.conftest import SECRET, Cluster

MODEL = "tiny"
MIB = 1 << 20
CHEAP_S = 0.25  # of CPU time, in which other processes do not show; what multiplies takes many seconds
GROWTH_BYTES = 10 * MIB


@pytest.fixture
def spec() -> RouterSpec:
    return RouterSpec(http_port=0, grpc_port=0, max_body_bytes=4 * MIB)


def completion(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x"} | fields).encode()


# Path, body, and the field that the error names.
SMALL: list[tuple[str, bytes, str | None]] = [
    ("completions", b"[" * 100_000, None),
    ("completions", b'{"a":' * 50_000, None),
    ("completions", HEAD + b'"\xff\xfe"}', None),
    ("completions", HEAD + b'"\\udc00"}', None),
    ("completions", HEAD + b'"x","' + b"a" * 50_000 + b'":1}', "a" * 80),
    ("completions", HEAD + b'"x","temperature":NaN}', "temperature"),
    ("completions", HEAD + b'"x","temperature":Infinity}', "temperature"),
    ("completions", HEAD + b'"x","presence_penalty":NaN}', "presence_penalty"),
    ("completions", HEAD + b'"x","frequency_penalty":-Infinity}', "frequency_penalty"),
    ("completions", HEAD + b'"x","repetition_penalty":NaN}', "repetition_penalty"),
    ("completions", HEAD + b'"x","logit_bias":{"5":NaN}}', "logit_bias"),
    ("completions", HEAD + b'"x","temperature":1e999}', "temperature"),
    ("completions", HEAD + b'"x","n":' + b"9" * 4000 + b"}", "n"),
    ("completions", HEAD + b'"x","seed":' + b"9" * 400 + b"}", "seed"),
    ("completions", completion(stop=["a"] * 10_000), "stop"),
    ("completions", completion(stop="a" * 10_000), "stop"),
    ("completions", completion(stop_token_ids=list(range(10_000))), "stop_token_ids"),
    ("completions", completion(stop_token_ids=[2**70]), "stop_token_ids"),
    ("completions", completion(n=10**9), "n"),
    ("completions", completion(max_tokens=-(2**63)), "max_tokens"),
    ("completions", completion(prompt=[2**40]), "prompt"),
    ("completions", completion(prompt=[-1]), "prompt"),
    ("completions", completion(prompt="word " * 6000), "prompt"),
    ("completions", completion(prompt="x" * 100_000), "prompt"),
    ("completions", completion(prompt=[[0]] * 10_000), "prompt"),
    ("completions", completion(logit_bias={str(number): 1 for number in range(5000)}), None),
    ("completions", completion(logit_bias={"9" * 5000: 1}), "logit_bias"),
    ("chat/completions", CHAT_HEAD + items(b"{}", 4_000) + b"}", "messages.0.role"),
    ("chat/completions", CHAT_HEAD + items(b"{}", 10_000) + b"}", "messages"),
    ("responses", b'{"model":"tiny","input":' + items(b"5", 4_000) + b"}", "input.0"),
    ("responses", b'{"model":"tiny","input":' + items(b"5", 10_000) + b"}", "input"),
]


def field(number: int, content: bytes) -> bytes:
    """One length-delimited field of a protobuf message."""
    size, head = len(content), b""
    while size > 0x7F:
        head, size = head + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + head + bytes([size]) + content


def number_of(kind: Any, name: str) -> int:
    return int(kind.DESCRIPTOR.fields_by_name[name].number)


def inside(kind: Any, name: str, content: bytes) -> bytes:
    return field(number_of(kind, name), content)


def nested(levels: int) -> bytes:
    """A `google.protobuf.Struct` of lists in lists."""
    value = b""
    for _ in range(levels):
        value = inside(struct_pb2.Value, "list_value", inside(struct_pb2.ListValue, "values", value))
    entry = struct_pb2.Struct.DESCRIPTOR.fields_by_name["fields"].message_type
    assert entry is not None
    return inside(struct_pb2.Struct, "fields", field(int(entry.fields_by_name["value"].number), value))


_MANY = 2 * MIB - 1000
_TENSOR = oip.ModelInferRequest.InferInputTensor
MULTIPLYING = {
    "/tandem.v1.Inference/Generate": [
        inside(pb.GenerateRequest, "chat", inside(pb.ChatMessages, "messages", b"") * _MANY),
        inside(pb.GenerateRequest, "sampling", inside(pb.SamplingParams, "stop", b"") * _MANY),
        inside(pb.GenerateRequest, "sampling", inside(pb.SamplingParams, "logit_bias", b"") * _MANY),
        inside(pb.GenerateRequest, "sampling", inside(pb.SamplingParams, "stop_token_ids", b"\1" * 2 * _MANY)),
        inside(pb.GenerateRequest, "token_ids", inside(pb.TokenIds, "ids", b"\1" * 2 * _MANY)),
        inside(pb.GenerateRequest, "prompt", b"x") + b"\x78\1" * _MANY,  # unknown
        inside(pb.GenerateRequest, "prompt", b"x") + b"\x0b" * _MANY,  # groups in groups
        inside(pb.GenerateRequest, "prompt", b"x") + b"\xff" * _MANY,
    ],
    "/vllm.Inference/Generate": [
        inside(vllm_pb2.GenerateRequest, "text", b"x" * 20_000)
        + inside(vllm_pb2.GenerateRequest, "kv", inside(vllm_pb2.KVCacheParameters, "kv_transfer_params", nested(400))),
        inside(vllm_pb2.GenerateRequest, "media", b"") * _MANY,
        inside(vllm_pb2.GenerateRequest, "stopping", inside(vllm_pb2.StoppingCriteria, "stop_strings", b"") * _MANY),
        inside(
            vllm_pb2.GenerateRequest,
            "decoding",
            inside(vllm_pb2.DecodingParameters, "bad_words_token_ids", b"") * _MANY,
        ),
    ],
    "/inference.GRPCInferenceService/ModelInfer": [
        inside(oip.ModelInferRequest, "inputs", b"") * _MANY,
        inside(oip.ModelInferRequest, "outputs", b"") * _MANY,
        inside(oip.ModelInferRequest, "parameters", b"") * _MANY,
        inside(oip.ModelInferRequest, "raw_input_contents", b"") * _MANY,
        inside(oip.ModelInferRequest, "inputs", inside(_TENSOR, "shape", b"\1" * 2 * _MANY)),
    ],
}


async def refuse(cluster: Cluster, path: str, body: bytes, field: str | None = None) -> float:
    started_s = time.process_time()
    reply = await cluster.http.post(f"/v1/{path}", content=body)
    took_s = time.process_time() - started_s
    error = reply.json()["error"]
    assert reply.status_code == 400, (path, body[:80], reply.text[:200])
    assert error["type"] == "invalid_request_error"
    assert len(reply.content) < 2000, "an error does not repeat what came"
    if field is not None:
        assert error["param"] == field, (body[:80], error)
    return took_s


async def still_serves(cluster: Cluster) -> None:
    cluster.says("fine")
    assert (await cluster.openai.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
    await cluster.settled()


@pytest.mark.acceptance(39, here="each limit")
async def test_malformed_requests_are_refused_fast(cluster: Cluster) -> None:
    await still_serves(cluster)
    for path, body, field in SMALL:
        took_s = min([await refuse(cluster, path, body, field) for _ in range(3)])
        assert took_s < CHEAP_S, (body[:80], took_s)
    await still_serves(cluster)


@pytest.mark.soak_only
async def test_bodies_that_grow_in_the_parser_leave_no_memory_behind(cluster: Cluster) -> None:
    process = psutil.Process()
    in_use: list[int] = []
    for _ in range(4):  # the threads of the parser keep the memory of their largest body, once
        for path, body in multiplying_bodies():
            await refuse(cluster, path, body)
        in_use.append(process.memory_info().rss)
    assert in_use[-1] - in_use[-2] < GROWTH_BYTES, in_use
    await still_serves(cluster)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.acceptance(19, here="as stated")
async def test_a_body_of_100_mb_is_refused_before_it_is_read(cluster: Cluster, chunked: bool) -> None:
    process = psutil.Process()
    in_use, took_s = [process.memory_info().rss], list[float]()
    for _ in range(3):
        took_s.append(await refused_unread(cluster, chunked))
        in_use.append(process.memory_info().rss)
    assert min(took_s) < 2 * CHEAP_S
    assert in_use[1] - in_use[0] < 30 * MIB, in_use  # the first run allocates what each of them needs
    assert in_use[-1] - in_use[-2] < GROWTH_BYTES, in_use
    await still_serves(cluster)


async def refused_unread(cluster: Cluster, chunked: bool) -> float:
    """The CPU time until it is refused."""
    part = b"x" * (256 << 10)
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.app.http_port)
    length = b"transfer-encoding: chunked" if chunked else b"content-length: 104857600"
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n")
    if chunked:
        for _ in range(17):  # a little above the limit
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
    started_s = time.process_time()
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
    took_s = time.process_time() - started_s
    assert head.startswith(b"HTTP/1.1 413")
    for _ in range(400):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        await writer.drain()
    writer.close()
    return took_s


async def test_grpc_refuses_malformed_requests_too(cluster: Cluster) -> None:
    many = pb.SamplingParams(stop=["a"] * 10_000)
    requests = [
        pb.GenerateRequest(prompt="x", sampling=many),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(stop_token_ids=[2**32 - 1])),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(stop_token_ids=range(300_000))),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=float("nan"))),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(100_000), 1.0))),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1_000_000)),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=2**32 - 1)),
    ]
    for request in requests:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in cluster.inference.Generate(request):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt="x" * (5 * MIB))):
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await still_serves(cluster)


async def test_grpc_messages_that_grow_are_refused_before_they_are_decoded(cluster: Cluster) -> None:
    """Two bytes on the wire become a submessage. No client library writes such messages."""
    for method, parts in MULTIPLYING.items():
        for data in parts:
            took_s: list[float] = []
            for _ in range(3):
                started_s = time.process_time()
                call = cluster.raw_stream(method)(data)  # one answer is a short stream
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, data[:20]
                took_s.append(time.process_time() - started_s)
            assert min(took_s) < 2 * CHEAP_S
    await still_serves(cluster)


async def test_grpc_echoes_the_clients_ids_as_http_does(cluster: Cluster) -> None:
    cluster.decode.behaviour.is_stuck = cluster.prefill.behaviour.is_stuck = True
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = (("x-request-id", "mine.1"), ("traceparent", trace))
    stub = GRPCInferenceServiceStub(cluster.channel)
    stream = cluster.inference.Generate(pb.GenerateRequest(prompt="x"), metadata=given)
    calls = [
        stream,  # it goes on: the client's library may forget the metadata of a stream that ends at once
        cluster.inference.ListModels(pb.ListModelsRequest(), metadata=given),
        stub.ServerLive(oip.ServerLiveRequest(), metadata=given),
        stub.ModelMetadata(oip.ModelMetadataRequest(name="none"), metadata=given),  # errors have them too
    ]
    for call in calls:
        assert set(given) <= set(await call.initial_metadata())
    assert await calls[-1].code() is grpc.StatusCode.NOT_FOUND
    cluster.decode.behaviour.is_stuck = cluster.prefill.behaviour.is_stuck = False
    stream.cancel()
    reply = await cluster.http.get("/health", headers=dict(given))
    assert (reply.headers["x-request-id"], reply.headers["traceparent"]) == ("mine.1", trace)
    await cluster.settled()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-id", "a" * 129),
        ("x-request-id", "a b"),
        ("traceparent", "00-" + "0" * 32 + "-b7ad6b7169203331-01"),
        ("traceparent", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("traceparent", "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" + "0" * 400),
    ],
)
async def test_ids_of_another_shape_are_not_echoed(cluster: Cluster, name: str, value: str) -> None:
    call = cluster.inference.ListModels(pb.ListModelsRequest(), metadata=((name, value),))
    assert name not in dict(await call.initial_metadata())
    reply = await cluster.http.get("/health", headers={name: value})
    assert reply.headers.get(name) != value


async def test_the_open_inference_protocol_refuses_bytes_that_are_no_message(cluster: Cluster) -> None:
    call: Any = cluster.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await call(b"\xff" * 100)
    stub = GRPCInferenceServiceStub(cluster.channel)
    tensor = oip.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[2**62])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(oip.ModelInferRequest(model_name=MODEL, inputs=[tensor], raw_input_contents=[b"1234"]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await still_serves(cluster)


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/tandem.v1.Traces/GetTrace",
    ],
)
async def test_services_beside_the_clients_refuse_bytes_that_are_no_message(cluster: Cluster, method: str) -> None:
    call = cluster.raw_stream(method)(b"\xff" * 100, metadata=((SECRET_KEY, SECRET),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
