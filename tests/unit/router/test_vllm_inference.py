"""vLLM's gRPC contract on the router: requests are answered as vLLM does, or refused with the name of a field."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from router.testing.stub_worker import script, until
from tandem.errors import ContextExceeded, ErrorCode, InputError, ModelNotFound, TandemError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.vllm_api import inference_pb2 as pb
from tandem.vllm_api import inference_pb2_grpc as pb_grpc
from tests.unit.router.conftest import EOS, MODEL, Cluster
from tests.unit.router.test_adapters import SQL, listed, serve


@pytest.fixture
def stub(bare: Cluster) -> pb_grpc.InferenceAsyncStub:
    return pb_grpc.InferenceStub(bare.channel)


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Hi", **fields)


async def streamed(stub: pb_grpc.InferenceAsyncStub, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [each async for each in stub.GenerateStream(asked)]


async def refused(stub: pb_grpc.InferenceAsyncStub, asked: pb.GenerateRequest) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(asked)
    with pytest.raises(grpc.aio.AioRpcError) as streamed_:
        await streamed(stub, asked)
    assert caught.value.code() == streamed_.value.code()
    return error_from_rpc(caught.value)


async def test_an_answer_comes_whole_or_in_parts(cluster: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    tokens = cluster.says("Hello €")
    asked = request(
        request_id="mine",
        model=MODEL,
        stopping=pb.StoppingCriteria(max_new_tokens=20),
        response=pb.ResponseOptions(output_token_ids=True, prompt_token_ids=True),
    )
    whole, parts = await stub.Generate(asked), await streamed(stub, asked)
    assert whole.outputs.text == "".join(part.outputs.text for part in parts) == "Hello €"
    assert list(whole.outputs.token_ids) == [token for part in parts for token in part.outputs.token_ids]
    assert list(whole.outputs.token_ids)[: len(tokens)] == tokens
    assert whole.outputs.num_tokens == sum(part.outputs.num_tokens for part in parts)
    assert [part.HasField("prompt_info") for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.outputs.HasField("finish_info") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert whole.prompt_info == parts[0].prompt_info
    prompt = next(iter(cluster.decode.works.values())).prompt
    assert (whole.prompt_info.num_prompt_tokens, list(whole.prompt_info.token_ids)) == (len(prompt), list(prompt))
    assert whole.outputs.finish_info.num_output_tokens == whole.outputs.num_tokens
    await cluster.settled()


async def test_what_is_not_asked_for_is_left_out(cluster: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    cluster.says("Hello")
    options = pb.ResponseOptions(output_text=False, output_candidates=pb.CandidateTokens(top_n=2))
    whole = await stub.Generate(request(response=options))
    outputs = whole.outputs
    assert outputs.num_tokens > 0
    assert (outputs.text, list(outputs.token_ids), list(outputs.logprobs), list(whole.prompt_info.token_ids)) == (
        "", [], [], [],
    )  # fmt: skip


async def test_sampling_reaches_the_worker(cluster: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    cluster.says("Hello")
    await stub.Generate(
        request(
            temperature=0.5,
            sampling=pb.RandomSampling(num_sequences=1, top_k=3, top_p=0.5, min_p=0.25, seed=7),
            decoding=pb.DecodingParameters(
                presence_penalty=0.5, frequency_penalty=1.5, repetition_penalty=1.25, logit_bias={70: 2.0}
            ),
            stopping=pb.StoppingCriteria(max_new_tokens=9, min_new_tokens=2, stop_token_ids=[71], ignore_eos=True),
        )
    )
    sampling = next(iter(cluster.decode.works.values())).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (
        0.5,
        3,
        0.5,
        0.25,
        7,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 1.5, 1.25)
    assert (sampling.max_tokens, sampling.min_tokens, list(sampling.stop_token_ids)) == (9, 2, [71])
    assert dict(sampling.logit_bias) == {70: 2.0}


async def test_a_request_without_settings_is_greedy_and_as_long_as_the_context_allows(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub
) -> None:
    cluster.says("Hello")
    await stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70, 71])))
    work = next(iter(cluster.decode.works.values()))
    assert (list(work.prompt), work.sampling.temperature, work.sampling.max_tokens) == ([70, 71], 0.0, 510)


@pytest.mark.parametrize(
    ("stopping", "reason", "told"),
    [
        (pb.StoppingCriteria(max_new_tokens=2), pb.FinishInfo.LENGTH, {}),
        (pb.StoppingCriteria(stop_strings=["STOP"]), pb.FinishInfo.STOP, {"stop_string": "STOP"}),
        (pb.StoppingCriteria(), pb.FinishInfo.STOP, {"eos_token_id": EOS}),
        (pb.StoppingCriteria(stop_token_ids=[EOS]), pb.FinishInfo.STOP, {"eos_token_id": EOS}),
        (pb.StoppingCriteria(stop_token_ids=[EOS], ignore_eos=True), pb.FinishInfo.STOP, {"stop_token_id": EOS}),
    ],
    ids=["length", "string", "eos", "eos and token", "token"],
)
async def test_the_end_says_why(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub, stopping: pb.StoppingCriteria, reason: int, told: dict[str, Any]
) -> None:
    tokens = [*cluster.says("one STOP two"), EOS]
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = script(tokens)
    info = (await stub.Generate(request(stopping=stopping))).outputs.finish_info
    kind = info.WhichOneof("stop_reason")
    assert (info.finish_reason, {} if kind is None else {kind: getattr(info, kind)}) == (reason, told)
    assert info.HasField("num_cached_tokens")


async def test_logprobs_of_answer_and_prompt_have_candidates_with_ranks(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub
) -> None:
    cluster.says("Hello")
    two = pb.CandidateTokens(top_n=2)
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[70, 71, 72]),
        response=pb.ResponseOptions(
            output_token_ids=True,
            output_logprobs=True,
            output_candidates=two,
            prompt_logprobs=True,
            prompt_candidates=two,
        ),
    )
    whole = await stub.Generate(asked)
    outputs, prompt = whole.outputs, whole.prompt_info
    count = len(outputs.token_ids)
    assert len(outputs.logprobs) == len(outputs.ranks) == len(outputs.candidate_tokens) == count > 0
    assert list(outputs.ranks) == [1] * count
    for token, candidates in zip(outputs.token_ids, outputs.candidate_tokens, strict=True):
        assert [(each.id, each.rank) for each in candidates.tokens] == [(token, 1), (token + 1, 2)]
    assert len(prompt.logprobs) == len(prompt.ranks) == len(prompt.candidate_tokens) == 3
    assert (prompt.logprobs[0], prompt.ranks[0], len(prompt.candidate_tokens[0].tokens)) == (0.0, 0, 0)
    assert [len(each.tokens) for each in prompt.candidate_tokens[1:]] == [2, 2]


async def test_a_session_and_a_salt_are_kept_apart(cluster: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    """And a request that bypasses the prefix cache has a salt of its own."""
    cluster.says("Hello")
    for kv in (pb.KVCacheParameters(cache_salt="s"),) * 2 + (pb.KVCacheParameters(bypass_prefix_cache=True),) * 2:
        await stub.Generate(request(kv=kv, session_id="conversation"))
    first, second, third, fourth = [work.cache_salt for work in cluster.decode.works.values()]
    assert first == second
    assert len({first, third, fourth}) == 3


async def test_an_adapter_is_named_beside_its_model(bare: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    await serve(bare, listed(sql=SQL), SQL)
    bare.says("Hello")
    for names in ({"lora_name": "sql"}, {"lora_name": "sql", "model": MODEL}, {"model": "sql"}):
        await stub.Generate(request(**names))
    assert [work.adapter for work in bare.decode.works.values()] == [SQL] * 3
    for names, said in (
        ({"lora_name": MODEL}, "lora_name: expected an adapter of a model, got 'tiny'"),
        ({"lora_name": "sql", "model": "other"}, "lora_name: expected an adapter of other, got 'sql'"),
    ):
        error = await refused(stub, request(**names))
        assert (error.message, error.field) == (said, "lora_name")
    assert isinstance(await refused(stub, request(lora_name="none")), ModelNotFound)


@pytest.mark.parametrize(
    ("decoding", "grammar"),
    [
        (pb.DecodingParameters(json='{"type": "integer"}'), True),
        (pb.DecodingParameters(regex="[0-9]+"), True),
        (pb.DecodingParameters(choice=pb.DecodingParameters.StringChoices(choices=["a", "b"])), True),
        (pb.DecodingParameters(grammar='start: "a"'), True),
        (pb.DecodingParameters(json_object=True), True),
        (pb.DecodingParameters(json_object=False), False),
        (
            pb.DecodingParameters(
                structural_tag='{"type": "structural_tag", "structures": [{"begin": "<f>", "end": "</f>"}], '
                '"triggers": ["<f>"]}'
            ),
            True,
        ),
    ],
    ids=["json", "regex", "choice", "grammar", "json_object", "no json_object", "structural_tag"],
)
async def test_structured_output_constrains_the_answer(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub, decoding: pb.DecodingParameters, grammar: bool
) -> None:
    cluster.says("1")
    await stub.Generate(request(decoding=decoding))
    work = next(iter(cluster.decode.works.values()))
    assert work.sampling.HasField("grammar") is grammar


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"media": [pb.MediaItem(url="http://x")]}, "media"),
        ({"kv_hints": pb.KVHintsEnvelope()}, "kv_hints"),
        ({"engine_reasoning_gate": pb.EngineReasoningGate()}, "engine_reasoning_gate"),
        ({"sampling": pb.RandomSampling(num_sequences=2)}, "sampling.num_sequences"),
        ({"decoding": pb.DecodingParameters(allowed_token_ids=[1])}, "decoding.allowed_token_ids"),
        ({"decoding": pb.DecodingParameters(bad_words_token_ids=[pb.TokenIds()])}, "decoding.bad_words_token_ids"),
        ({"stopping": pb.StoppingCriteria(include_stop_strings=True)}, "stopping.include_stop_strings"),
        ({"stopping": pb.StoppingCriteria(thinking_token_budget=0)}, "stopping.thinking_token_budget"),
        ({"response": pb.ResponseOptions(skip_special_tokens=False)}, "response.skip_special_tokens"),
        ({"kv": pb.KVCacheParameters(kv_transfer_params=struct_pb2.Struct())}, "kv.kv_transfer_params"),
        ({"kv": pb.KVCacheParameters(ec_transfer_params=struct_pb2.Struct())}, "kv.ec_transfer_params"),
        (
            {
                "response": pb.ResponseOptions(
                    output_logprobs=True, output_candidates=pb.CandidateTokens(token_ids=pb.TokenIds(ids=[1]))
                )
            },
            "response.output_candidates.token_ids",
        ),
        (
            {"response": pb.ResponseOptions(prompt_logprobs=True, prompt_candidates=pb.CandidateTokens(all=True))},
            "response.prompt_candidates.all",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_what_cannot_be_served_is_refused_by_name(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub, fields: dict[str, Any], field: str
) -> None:
    error = await refused(stub, request(**fields))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED_FIELD, field)
    assert not cluster.decode.works


@pytest.mark.parametrize(
    ("asked", "kind", "field"),
    [
        (pb.GenerateRequest(), InputError, "prompt"),
        (pb.GenerateRequest(text=""), InputError, "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])), InputError, "prompt"),
        (request(model="other"), ModelNotFound, "model"),
        (request(temperature=-1.0), InputError, "temperature"),
        (request(kv=pb.KVCacheParameters(cache_salt="x" * 257)), InputError, "kv.cache_salt"),
        (request(decoding=pb.DecodingParameters(json="{")), InputError, "decoding.json"),
        (request(decoding=pb.DecodingParameters(structural_tag="{")), InputError, "decoding.structural_tag"),
        (request(stopping=pb.StoppingCriteria(max_new_tokens=2000)), ContextExceeded, "stopping.max_new_tokens"),
        (request(stopping=pb.StoppingCriteria(stop_strings=[""])), InputError, "stopping.stop_strings"),
        (request(sampling=pb.RandomSampling(top_p=2.0)), InputError, "sampling.top_p"),
        (request(decoding=pb.DecodingParameters(logit_bias={2**31: 1.0})), InputError, "decoding.logit_bias"),
        (
            request(
                response=pb.ResponseOptions(output_logprobs=True, output_candidates=pb.CandidateTokens(top_n=2**32 - 1))
            ),
            InputError,
            "response.output_candidates.top_n",
        ),
    ],
)
async def test_bad_input_names_its_field(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub, asked: pb.GenerateRequest, kind: type[TandemError], field: str
) -> None:
    error = await refused(stub, asked)
    assert isinstance(error, kind)
    assert error.field == field
    assert error.message.startswith(f"{field}:")


async def test_a_stream_that_is_cancelled_ends_its_request(cluster: Cluster, stub: pb_grpc.InferenceAsyncStub) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    stream = stub.GenerateStream(request())
    reading = asyncio.ensure_future(stream.read())
    await until(lambda: len(cluster.prefill.frames("prefill")) == 1)
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: cluster.ends("cancelled") == 1)
    await cluster.settled()


async def test_a_repeated_request_with_its_key_gets_the_same_answer(
    cluster: Cluster, stub: pb_grpc.InferenceAsyncStub
) -> None:
    cluster.says("Hello")
    key = (("idempotency-key", "k"),)
    first, again = [await stub.Generate(request(temperature=1.0), metadata=key) for _ in range(2)]
    assert first == again
    assert len(cluster.decode.works) == 1
