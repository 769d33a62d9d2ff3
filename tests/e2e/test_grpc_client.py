"""A gRPC client against a whole cluster: tokens, timelines, errors with details, cancellation, health, reflection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from tandem.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Golden

pytestmark = pytest.mark.e2e
MODEL = "smollm2-135m"


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate(prompt: list[int], max_tokens: int = 32, **sampling: object) -> inference_pb2.GenerateRequest:
    fields = {"temperature": 0.0, "max_tokens": max_tokens} | sampling
    return inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(**fields),  # type: ignore[arg-type]
    )


async def answer(
    stub: inference_pb2_grpc.InferenceAsyncStub, request: inference_pb2.GenerateRequest
) -> tuple[list[int], str, inference_pb2.Finished]:
    tokens: list[int] = []
    text = ""
    finished = inference_pb2.Finished()
    async for event in stub.Generate(request):
        match event.WhichOneof("event"):
            case "chunk":
                tokens.extend(event.chunk.token_ids)
                text += event.chunk.text
            case "finished":
                finished = event.finished
    return tokens, text, finished


@pytest.mark.slow
async def test_the_reference_tokens_come_out_one_by_one(
    stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    for entry in golden:
        tokens, _, finished = await answer(stub, generate(entry.prompt_ids))
        assert tokens == entry.greedy_ids
        assert finished.usage.completion_tokens == len(entry.greedy_ids)


async def test_chat_input_is_templated_and_tokenised_as_the_reference(
    stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content=golden[1].prompt)])
    reply = await stub.Tokenize(inference_pb2.TokenizeRequest(model=MODEL, chat=chat))
    assert list(reply.token_ids) == golden[1].prompt_ids
    assert reply.max_model_tokens == 8192


async def test_a_new_prompt_moves_its_kv_and_says_where_its_time_went(
    stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    prompt = [random.Random(5).randrange(100, 40000) for _ in range(100)]
    _, _, finished = await answer(stub, generate(prompt, 8, ignore_eos=True))
    timeline = finished.timeline
    assert timeline.prefill_worker != timeline.decode_worker
    assert timeline.kv_bytes_moved == 100 * 23040 * 2  # 100 tokens of fp32 keys and values, 23,040 B/token in 16 bits
    assert 0 < timeline.ttft_s <= timeline.total_s
    _, _, again = await answer(stub, generate(prompt, 8, ignore_eos=True))
    assert again.usage.cached_tokens >= 96
    assert again.timeline.kv_bytes_moved < timeline.kv_bytes_moved


async def test_seeded_sampling_repeats(stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]) -> None:
    request = generate(golden[2].prompt_ids, 12, temperature=0.9, top_p=0.9, seed=11)
    assert (await answer(stub, request))[0] == (await answer(stub, request))[0]


async def test_stop_strings_end_the_text_before_them(
    stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    _, text, finished = await answer(stub, generate(golden[0].prompt_ids, stop=["is Paris"]))
    assert text == "The capital of France "
    assert finished.reason == inference_pb2.FINISH_REASON_STOP


async def test_logprobs_come_with_their_tokens(
    stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    found = [
        entry
        async for event in stub.Generate(generate(golden[0].prompt_ids, 4, logprobs=3))
        for entry in event.chunk.logprobs
    ]
    assert [entry.token_id for entry in found] == golden[0].greedy_ids[:4]
    assert all(len(entry.top) == 3 and entry.top[0].token_id == entry.token_id for entry in found)


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (inference_pb2.GenerateRequest(model="nobody", prompt="x"), grpc.StatusCode.NOT_FOUND, "model"),
        (inference_pb2.GenerateRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (generate([10**6]), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (generate([5], temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (generate([5], max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (generate([5] * 9000), grpc.StatusCode.INVALID_ARGUMENT, ""),
    ],
)
async def test_errors_carry_a_status_and_details(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    request_: inference_pb2.GenerateRequest,
    status: grpc.StatusCode,
    field: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answer(stub, request_)
    assert refused.value.code() == status
    details = await asyncio.to_thread(rpc_status.from_call, refused.value)
    assert details is not None
    info = error_details_pb2.ErrorInfo()
    assert details.details[0].Unpack(info)
    if field:
        assert info.metadata["field"] == field


async def test_cancelling_half_of_sixteen_streams_leaves_nothing_behind(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceAsyncStub, golden: list[Golden]
) -> None:
    dice = random.Random(3)

    async def ask(number: int) -> list[int]:
        call = stub.Generate(generate(golden[1 + number % 2].prompt_ids))
        tokens: list[int] = []
        if number % 2 == 0:
            async for event in call:
                tokens.extend(event.chunk.token_ids)
            return tokens
        most, events = dice.randrange(21), aiter(call)
        while len(tokens) < most:
            tokens.extend((await anext(events)).chunk.token_ids)
        call.cancel()
        return tokens

    answers = await asyncio.gather(*(ask(number) for number in range(16)))
    for number in range(0, 16, 2):
        assert answers[number] == golden[1 + number % 2].greedy_ids
    await asyncio.to_thread(cluster.assert_conserved)


async def test_health_and_reflection_answer(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING

    def services() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "tandem.v1.Inference" in await asyncio.to_thread(services)


async def test_models_and_server_are_described(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
    models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(model.name, model.max_model_tokens, model.ready) for model in models] == [(MODEL, 8192, True)]
    info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
    assert (info.prefill_workers, info.decode_workers) == (1, 1)
