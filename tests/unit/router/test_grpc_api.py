import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.edge import grpc as grpc_edge
from router.edge.grpc_server import MAX_PUBLIC_STREAMS, SHARE_OF_ONE
from router.testing.stub_worker import until
from tandem.config.model import Role
from tandem.errors import ContextExceeded, InputError, ModelNotFound
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

NAN = float("nan")


async def test_generate_streams_started_chunks_finished(cluster: Cluster) -> None:
    tokens = cluster.says("Hello €")
    events = [event async for event in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi there"))]
    assert events[0].started.prompt_tokens == len(cluster.tokenizer.encode("Hi there", add_special_tokens=True))
    assert "".join(event.chunk.text for event in events) == "Hello €"
    assert [token for event in events for token in event.chunk.token_ids] == tokens
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == len(tokens)


async def test_the_timeline_includes_the_handoff(cluster: Cluster) -> None:
    cluster.says("Hello")
    cluster.prefill.behaviour.cached_tokens = cluster.decode.behaviour.cached_tokens = 16
    events = [e async for e in cluster.inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * 40)))]
    line = events[-1].finished.timeline
    assert (line.prefill_worker, line.decode_worker) == ("p0", "d0")
    assert (line.cached_tokens_prefill, line.cached_tokens_decode) == (16, 16)
    assert line.kv_blocks_moved == 2
    assert line.kv_bytes_moved > 0
    assert 0 <= line.ttft_s <= line.total_s
    assert events[-1].finished.usage.cached_tokens == 16


async def test_chat_uses_the_template(cluster: Cluster) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
    tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    events = [event async for event in cluster.inference.Generate(pb.GenerateRequest(chat=chat))]
    assert events[0].started.prompt_tokens == len(tokenized.token_ids)
    assert "Hi" in cluster.tokenizer.decode(list(tokenized.token_ids))
    assert tokenized.max_model_tokens == 512


async def test_logprobs_are_included_on_request(cluster: Cluster) -> None:
    cluster.says("ab")
    request = pb.GenerateRequest(prompt="Hi", sampling=pb.SamplingParams(logprobs=2))
    events = [event async for event in cluster.inference.Generate(request)]
    logprobs = [each for event in events for each in event.chunk.logprobs]
    assert [round(each.logprob, 3) for each in logprobs] == [-0.5] * len(logprobs)
    assert all(len(each.top) == 2 for each in logprobs)


async def test_penalties_and_bias_reach_the_workers(cluster: Cluster) -> None:
    given = pb.SamplingParams(
        presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=2.0, logit_bias={9: -100.0}
    )
    async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi", sampling=given)):
        pass
    [work] = cluster.decode.works.values()
    sampling = work.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.5, 2.0)
    assert dict(sampling.logit_bias) == {9: -100.0}


async def test_logprobs_of_the_prompt_come_with_the_first_chunk(cluster: Cluster) -> None:
    cluster.says("abc")
    prompt = pb.TokenIds(ids=[70, 71, 72])
    request = pb.GenerateRequest(token_ids=prompt, sampling=pb.SamplingParams(prompt_logprobs=1))
    chunks = [event.chunk async for event in cluster.inference.Generate(request) if event.HasField("chunk")]
    assert [each.token_id for each in chunks[0].prompt_logprobs] == [71, 72]
    assert all(len(each.top) == 1 for each in chunks[0].prompt_logprobs)
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])


async def test_many_logprobs_of_the_prompt_come_in_slices(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_edge, "SLICE_LOGPROBS", 10)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(70, 80)), sampling=pb.SamplingParams(prompt_logprobs=2, max_tokens=2)
    )
    chunks = [event.chunk async for event in cluster.inference.Generate(request) if event.HasField("chunk")]
    slices = [[each.token_id for each in chunk.prompt_logprobs] for chunk in chunks if chunk.prompt_logprobs]
    assert slices == [[71, 72, 73], [74, 75, 76], [77, 78, 79]]
    assert not any(chunk.token_ids for chunk in chunks[:3])
    assert sum(len(chunk.token_ids) for chunk in chunks) == 2


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (pb.GenerateRequest(), InputError, "input"),
        (pb.GenerateRequest(prompt=""), InputError, "prompt"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), InputError, "chat"),
        (pb.GenerateRequest(prompt="x", model="nope"), ModelNotFound, "model"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 600)), ContextExceeded, "prompt"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=-1)), InputError, "temperature"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=NAN)), InputError, "temperature"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=0)), InputError, "max_tokens"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logprobs=21)), InputError, "logprobs"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(min_p=NAN)), InputError, "min_p"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logit_bias={5: NAN})), InputError, "logit_bias"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logit_bias={320: 1})), InputError, "logit_bias"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(stop=["a"] * 17)), InputError, "stop"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(prompt_logprobs=21)), InputError, "prompt_logprobs"),
    ],
    ids=lambda value: str(MessageToDict(value))[:40] if isinstance(value, pb.GenerateRequest) else None,
)
async def test_bad_request_is_refused_with_its_field(
    cluster: Cluster, request_: pb.GenerateRequest, error: type[Exception], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.inference.Generate(request_):
            pass
    typed = error_from_rpc(caught.value)
    assert type(typed) is error
    assert typed.field == field
    assert cluster.ends("rejected") == 1


async def test_models_and_server_info(cluster: Cluster) -> None:
    [card] = (await cluster.inference.ListModels(pb.ListModelsRequest())).models
    assert (card.name, card.max_model_tokens, card.vocab_tokens, card.ready) == ("tiny", 512, 320, True)
    info = await cluster.inference.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.cluster, info.router_id, info.prefill_workers, info.decode_workers) == ("test", "router-0", 1, 1)


async def test_deadline_cancels_the_request_on_both_workers(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    await cluster.channel.channel_ready()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi"), timeout=3.0):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: bool(cluster.prefill.cancelled and cluster.decode.cancelled))
    assert cluster.ends("failed") == 1


async def test_watches_that_need_no_key_are_few_and_displace_nothing(cluster: Cluster) -> None:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_PUBLIC_STREAMS // SHARE_OF_ONE)]
    for watch in watches:
        await watch.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Watch(health_pb2.HealthCheckRequest()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    cluster.says("Hello")
    events = [event async for event in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi"))]
    assert events[-1].HasField("finished")
    watches.pop().cancel()
    async with asyncio.timeout(60):
        while await _is_refused(stub):
            await asyncio.sleep(0.01)
    for watch in watches:
        watch.cancel()


async def _is_refused(stub: health_pb2_grpc.HealthStub) -> bool:
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        await watch.read()
    except grpc.aio.AioRpcError:
        return True
    watch.cancel()
    return False


async def test_health_follows_readiness(bare: Cluster) -> None:
    stub = health_pb2_grpc.HealthStub(bare.channel)

    async def becomes(wanted: Any, name: str) -> None:
        async with asyncio.timeout(60):
            while (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status != wanted:
                await asyncio.sleep(0.01)

    for name in ("", "tandem.v1.Inference"):
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING, name)
    await bare.list_workers(bare.decode)
    await becomes(health_pb2.HealthCheckResponse.SERVING, "")
    await bare.list_workers()
    assert bare.app.dispatcher.fleet.count_ready(Role.DECODE) == 0
    await becomes(health_pb2.HealthCheckResponse.NOT_SERVING, "tandem.v1.Inference")


async def test_reflection_lists_the_service(cluster: Cluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    reply = await call.read()
    assert "tandem.v1.Inference" in {each.name for each in reply.list_services_response.service}
