"""A client's prediction of the answer: what workers get of it, what is refused, and what usage tells of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.requests.output import Usage
from router.requests.raw_request import RawRequest, RawSampling
from router.requests.timeline import ProposalCounts
from router.testing.stub_worker import StubWorker, script
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import worker_pb2
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
PROMPT = "What does the file say now?"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
COMPLETION = {"model": MODEL, "prompt": PROMPT}
TEXT = "def total(prices):\n    return sum(prices)\n"
PREDICTION = {"type": "content", "content": TEXT}


@pytest.fixture
async def spare(cluster: Cluster) -> AsyncIterator[StubWorker]:
    worker = StubWorker("d1", Role.DECODE, MODEL)
    await worker.start()
    await cluster.list_workers(cluster.prefill, cluster.decode, worker)
    yield worker
    await worker.kill()


def tokens_of(cluster: Cluster, text: str) -> list[int]:
    return cluster.tokenizer.encode(text, add_special_tokens=False)


def predictions(worker: StubWorker) -> list[list[int]]:
    return [list(work.prediction) for work in worker.works.values()]


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]], ids=["text", "parts"]
)
async def test_its_tokens_go_to_the_worker_that_decodes(cluster: Cluster, content: Any) -> None:
    await cluster.openai.chat.completions.create(**CHAT, prediction={"type": "content", "content": content})
    assert predictions(cluster.decode) == [tokens_of(cluster, TEXT)]
    assert predictions(cluster.prefill) == [[]], "which only computes the prompt"


class TestLocalPrefill:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.NEVER)

    async def test_they_go_with_the_prompt(self, cluster: Cluster) -> None:
        await cluster.openai.chat.completions.create(**CHAT, prediction=PREDICTION)
        assert predictions(cluster.decode) == [tokens_of(cluster, TEXT)]


async def test_all_choices_and_prompts_of_a_completion_have_it(cluster: Cluster) -> None:
    sent = {"model": MODEL, "prompt": ["one", "two"], "n": 3, "extra_body": {"prediction": PREDICTION}}
    answer = await cluster.openai.completions.create(**sent)
    assert len(answer.choices) == 6
    assert predictions(cluster.decode) == [tokens_of(cluster, TEXT)] * 6


async def test_an_attempt_that_continues_an_answer_has_it_and_counts_add_up(
    cluster: Cluster, spare: StubWorker
) -> None:
    tokens = cluster.says(TEXT)
    spare.behaviour.answer = script(tokens)
    cluster.decode.behaviour.proposals, cluster.decode.behaviour.fail_decodes = {1: (3, 0, True)}, 1
    spare.behaviour.proposals = {3: (5, 4, True), 9: (2, 1, False)}
    sent = CHAT | {"prediction": PREDICTION, "max_tokens": 14, "temperature": 0}
    answer = await cluster.openai.chat.completions.create(**sent)
    assert answer.choices[0].message.content == cluster.tokenizer.decode(tokens[:14])
    assert predictions(spare) == [tokens_of(cluster, TEXT)]
    assert [work.answer_tokens for work in spare.works.values()] == [2]
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 4)
    assert answer.usage.speculation == {"accepted_tokens": 5, "unused_tokens": 5}
    await cluster.settled()


async def test_it_shares_cached_blocks_with_requests_without(cluster: Cluster) -> None:
    """Neither hashes nor salt know of it."""
    raws = [RawRequest(MODEL, PROMPT, RawSampling(), prediction=each) for each in (None, TEXT, (5, 6, 7))]
    submitted = [await cluster.app.service.submit(raw) for raw in raws]
    hashes = [(each.request.block_hashes, each.request.cache_salt, each.request.session) for each in submitted]
    assert hashes[0] == hashes[1] == hashes[2]
    assert hashes[0][0], "a prompt of at least one block"
    for each in submitted:
        each.stream.cancel()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("given", "param", "code", "says"),
    [
        ({}, "prediction.type", "missing_required_parameter", "expected a value"),
        ("text", "prediction", "invalid_type", "expected an object, got 'text'"),
        ({"type": "content"}, "prediction.content", "missing_required_parameter", "expected a value"),
        ({"type": "image", "content": "x"}, "prediction.type", "invalid_value", "expected 'content', got 'image'"),
        ({"type": "content", "content": 5}, "prediction.content", "invalid_type", "expected a string or a list, got 5"),
        (
            {"type": "content", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "text": "x"}]},
            "prediction.content.1.type",
            "invalid_value",
            "expected 'text', got 'image_url'",
        ),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content.0.text", None, "expected a value"),
        (PREDICTION | {"more": 1}, "prediction.more", "unknown_parameter", "leave it out"),
        ({"type": "content", "content": "x" * 600}, "prediction", "context_length_exceeded", "at most 512"),
        ({"type": "content", "content": "x" * 40_000}, "prediction", "context_length_exceeded", "shorten"),
    ],
)
async def test_what_can_be_no_prediction_is_refused_by_field(
    cluster: Cluster, path: str, given: Any, param: str, code: str | None, says: str
) -> None:
    body = CHAT if path.startswith("chat") else COMPLETION
    reply = await cluster.http.post(f"/v1/{path}", json=body | {"prediction": given})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code or "missing_required_parameter")
    assert error["message"].startswith(f"{param}: ")
    assert says in error["message"]
    assert not cluster.decode.works


async def test_as_long_as_the_context_is_just_right(cluster: Cluster) -> None:
    text = "xyzw" * 128
    while len(tokens_of(cluster, text)) > 512:
        text = text[:-1]
    assert len(tokens_of(cluster, text)) == 512
    await cluster.openai.chat.completions.create(**CHAT, prediction={"type": "content", "content": text})
    assert [len(each) for each in predictions(cluster.decode)] == [512]


async def test_it_counts_towards_the_size_of_a_body(cluster: Cluster) -> None:
    body = CHAT | {"prediction": {"type": "content", "content": "x" * 65536}}
    assert (await cluster.http.post("/v1/chat/completions", json=body)).status_code == 413


class TestUsage:
    async def test_names_what_was_taken_from_it_and_what_was_not(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.proposals = {1: (8, 7, True), 9: (3, 2, False)}
        answer = await cluster.openai.chat.completions.create(**CHAT, prediction=PREDICTION, n=2)
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (14, 2)
        assert answer.usage.speculation == {"accepted_tokens": 18, "unused_tokens": 4}
        assert cluster.metric('tandem_prediction_tokens_total{model="tiny",outcome="accepted"}') == 14
        assert cluster.metric('tandem_prediction_tokens_total{model="tiny",outcome="rejected"}') == 2

    async def test_of_a_stream_has_it_at_the_end(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.proposals = {1: (8, 7, True)}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await cluster.openai.chat.completions.create(**CHAT, prediction=PREDICTION, **options)
        usages = [event.usage async for event in stream if event.usage is not None]
        assert [each.completion_tokens_details.accepted_prediction_tokens for each in usages] == [7]

    async def test_without_speculation_says_that_nothing_was_taken(self, cluster: Cluster) -> None:
        for body in (CHAT | {"prediction": PREDICTION}, CHAT | {"prediction": PREDICTION | {"content": ""}}):
            usage = (await cluster.http.post("/v1/chat/completions", json=body)).json()["usage"]
            assert usage["completion_tokens_details"] == {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            }
            assert "speculation" not in usage

    async def test_without_a_prediction_has_only_what_workers_proposed(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.proposals = {1: (2, 2, False)}
        usage = (await cluster.http.post("/v1/chat/completions", json=CHAT)).json()["usage"]
        assert "completion_tokens_details" not in usage
        assert usage["speculation"] == {"accepted_tokens": 2, "unused_tokens": 0}

    async def test_counts_no_token_behind_a_stop_string(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.decode.behaviour.proposals = {1: (30, 30, True)}
        answer = await cluster.openai.chat.completions.create(**CHAT, prediction=PREDICTION, stop="return")
        usage = answer.usage
        assert usage.completion_tokens < len(tokens)
        accepted = usage.completion_tokens - 1
        assert usage.speculation == {"accepted_tokens": accepted, "unused_tokens": 30 - accepted}
        assert usage.completion_tokens_details.rejected_prediction_tokens == 30 - accepted

    async def test_is_in_the_trace(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.proposals = {1: (5, 2, False)}
        answer = await cluster.openai.chat.completions.create(**CHAT)
        wire = cluster.app.observers.traces.store.get(answer.id).to_wire()
        assert (wire.accepted_tokens, wire.unused_tokens) == (2, 3)


def test_counts_of_several_steps_and_attempts() -> None:
    counts = ProposalCounts()
    for at, (proposed, accepted, predicted) in {1: (4, 4, True), 6: (3, 1, False), 9: (5, 3, True)}.items():
        token = worker_pb2.StepToken(
            proposed_tokens=proposed, accepted_tokens=accepted, from_prediction=predicted, token_id=1
        )
        counts.add(token, at)
    assert counts.of_answer(13) == counts.of_answer(12) == (8, 4, 7, 2)
    assert counts.of_answer(10) == (6, 6, 5, 4)  # it ended with the first of the last three
    assert Usage(5, 13, 0, *counts.of_answer(13)).rejected_prediction_tokens == 2


class TestGrpc:
    @pytest.mark.parametrize("as_text", [True, False])
    async def test_takes_text_or_tokens(self, cluster: Cluster, as_text: bool) -> None:
        tokens = tokens_of(cluster, TEXT)
        cluster.says(TEXT)
        cluster.decode.behaviour.proposals = {1: (8, 7, True), 9: (2, 0, False)}
        given = pb.Prediction(text=TEXT) if as_text else pb.Prediction(token_ids=pb.TokenIds(ids=tokens))
        request = pb.GenerateRequest(prompt=PROMPT, prediction=given)
        events = [event async for event in cluster.inference.Generate(request)]
        assert predictions(cluster.decode) == [tokens]
        usage = events[-1].finished.usage
        assert (usage.accepted_tokens, usage.unused_tokens) == (7, 3)
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (7, 1)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (pb.Prediction(), "expected text or token_ids, got neither"),
            (pb.Prediction(token_ids=pb.TokenIds(ids=[5] * 513)), "the prediction has 513"),
            (pb.Prediction(token_ids=pb.TokenIds(ids=[5, 1 << 30])), "expected token ids from 0"),
            (pb.Prediction(text="x" * 600), "the prediction has 600"),
        ],
    )
    async def test_refuses_by_field(self, cluster: Cluster, given: pb.Prediction, says: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt=PROMPT, prediction=given)):
                pass
        error = error_from_rpc(caught.value)
        assert error.field == "prediction"
        assert says in error.message
