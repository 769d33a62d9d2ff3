"""Several answers to one request: choices, prompts, and prompts that are echoed with their logprobs."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import openai
import pytest

from router import service
from router.requests import answer_limits
from router.requests.raw_request import RawRequest, RawSampling
from router.testing.stub_worker import until
from tandem.config.router import Disaggregation, RouterSpec
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
COMPLETION = {"model": MODEL, "prompt": "Hi"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
EOS = 2


def echoes(cluster: Cluster) -> None:
    """Both workers answer every prompt with its last three tokens."""
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: list(prompt[-3:])


async def test_choices_draw_with_seeds_of_their_own_and_the_first_with_the_requests(cluster: Cluster) -> None:
    cluster.says("fine")
    answer = await cluster.openai.chat.completions.create(**CHAT, n=3, seed=2**63 - 1, max_tokens=4)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(n, "fine") for n in range(3)]
    works = list(cluster.decode.works.values())
    assert sorted(work.sampling.seed for work in works) == [2**63 - 1, 2**63, 2**63 + 1]
    assert len({work.request_id for work in works}) == 3
    assert answer.usage.prompt_tokens == len(works[0].prompt)
    assert answer.usage.completion_tokens == 3 * len(cluster.says("fine"))
    await cluster.settled()


async def test_prompts_are_answered_in_their_order(cluster: Cluster) -> None:
    echoes(cluster)
    prompts = ["a 123", "b 456", "c 789"]
    answer = await cluster.openai.completions.create(model=MODEL, prompt=prompts, n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == ["123", "123", "456", "456", "789", "789"]
    assert [choice.index for choice in answer.choices] == list(range(6))
    counts = [len(cluster.tokenizer.encode(prompt, add_special_tokens=True)) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(counts)
    ids = await cluster.openai.completions.create(model=MODEL, prompt=[[70, 71, 72], [73, 74, 75]])
    expected = [cluster.tokenizer.decode(part) for part in ([70, 71, 72], [73, 74, 75])]
    assert [choice.text for choice in ids.choices] == expected


async def test_each_request_of_a_call_in_parts_has_an_id_of_its_own(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in parts of one: a worker and the traces tell requests apart by it."""
    monkeypatch.setattr(service, "PART_TOKENS", 1)
    raws = [RawRequest(MODEL, text, RawSampling(max_tokens=1)) for text in ("one", "two", "three")]
    terms = cluster.app.service.terms(lambda name: None)
    parts = cluster.app.service.submit_in_parts(raws, ["input.0", "input.1", "input.2"], 4, "call", terms)
    ids: list[str] = []
    async for answers in parts:
        await answers.collect()
        ids += [each.request.request_id for each in answers.submitted]
    assert ids == ["call-part0", "call-part1", "call-part2"]
    assert cluster.prefill.frames("generate") + cluster.decode.frames("generate") == [f"{each}.1" for each in ids]
    await cluster.settled()


async def test_streams_of_several_answers_are_told_apart(cluster: Cluster) -> None:
    echoes(cluster)
    stream = await cluster.openai.completions.create(
        model=MODEL, prompt=["a 123", "b 456"], stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = {0: "", 1: ""}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "123", 1: "456"}
    assert reasons == {0: "length", 1: "length"}
    assert chunk.usage.completion_tokens == 6


async def test_chat_stream_of_two_choices_introduces_each(cluster: Cluster) -> None:
    cluster.says("ok")
    chunks = [chunk async for chunk in await cluster.openai.chat.completions.create(**CHAT, n=2, stream=True)]
    roles = [choice.index for chunk in chunks for choice in chunk.choices if choice.delta.role]
    assert roles == [0, 1]
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "ok"
        assert own[-1].finish_reason == "length"


class TestShortQueue:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, queue_timeout_s=0.5)

    async def test_when_one_answer_fails_the_others_are_cancelled(self, cluster: Cluster) -> None:
        cluster.says("long answer")
        cluster.prefill.behaviour.hold_prefills = True
        cluster.decode.behaviour.refuse_reservations = 10_000
        with pytest.raises(openai.InternalServerError):
            await cluster.openai.completions.create(**COMPLETION, n=3)
        await cluster.settled()


class TestLittleRoom:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, max_queued_requests=4)

    async def test_all_answers_are_admitted_or_none(self, bare: Cluster) -> None:
        with pytest.raises(openai.RateLimitError):
            await bare.openai.completions.create(model=MODEL, prompt=["x"] * 3, n=3)
        assert bare.app.dispatcher.active == 0
        assert bare.ends("cancelled") == 4


async def test_a_client_that_leaves_cancels_every_choice(cluster: Cluster) -> None:
    cluster.says("a rather long answer that goes on")
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.token_delay_s = 0.2
    stream = await cluster.openai.completions.create(**COMPLETION, n=3, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await cluster.settled()
    assert cluster.ends("cancelled") == 3


class TestEcho:
    async def test_the_prompt_comes_before_the_answer(self, cluster: Cluster) -> None:
        cluster.says(" there")
        answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi  you", echo=True)
        assert answer.choices[0].text == "Hi  you there"
        assert answer.choices[0].logprobs is None
        ids = await cluster.openai.completions.create(model=MODEL, prompt=[1, 70, 71], echo=True, n=2)
        expected = cluster.tokenizer.decode([1, 70, 71], skip_special_tokens=False) + " there"
        assert [choice.text for choice in ids.choices] == [expected] * 2

    async def test_logprobs_cover_prompt_and_answer(self, cluster: Cluster) -> None:
        tokens = cluster.says("!?")
        answer = await cluster.openai.completions.create(model=MODEL, prompt=[70, 71, 72], echo=True, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert "".join(logprobs.tokens) == answer.choices[0].text
        assert logprobs.token_logprobs == [None, *[-0.5] * (2 + len(tokens))]
        assert logprobs.top_logprobs[0] is None
        assert all(max(top.values()) == -0.5 for top in logprobs.top_logprobs[1:])
        assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:n])) for n in range(len(logprobs.tokens))]
        [work] = cluster.prefill.works.values()
        assert work.sampling.prompt_logprobs == 2

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_one_choice_gets_the_prompts_logprobs_for_all(self, cluster: Cluster, stream: bool) -> None:
        echoes(cluster)
        prompts = [[70, 71, 72, 73], [74, 75, 76]]
        call = {"model": MODEL, "prompt": prompts, "n": 3, "echo": True, "logprobs": 2, "stream": stream}
        answer = await cluster.openai.completions.create(**call)
        parts = [choice for chunk in [each async for each in answer] for choice in chunk.choices] if stream else None
        for index in range(6):
            own = [each for each in (parts or answer.choices) if each.index == index]
            scored = [each.logprobs for each in own if each.logprobs is not None]
            tokens = [token for each in scored for token in each.tokens]
            assert "".join(tokens) == "".join(each.text for each in own)
            expected = prompts[index // 3] + prompts[index // 3][-3:]
            assert tokens == [cluster.tokenizer.decode([each]) for each in expected]
            assert [each for one in scored for each in one.token_logprobs] == [None, *[-0.5] * (len(expected) - 1)]
            offsets = [at for each in scored for at in each.text_offset]
            assert offsets == [sum(map(len, tokens[:number])) for number in range(len(tokens))]
        works = cluster.prefill.works.values()
        assert sorted(work.sampling.HasField("prompt_logprobs") for work in works) == [False] * 4 + [True] * 2
        await cluster.settled()

    async def test_max_tokens_zero_gives_the_prompt_alone(self, cluster: Cluster) -> None:
        cluster.says("never shown")
        answer = await cluster.openai.completions.create(
            model=MODEL, prompt=["ab", "cde"], echo=True, max_tokens=0, logprobs=1
        )
        assert [choice.text for choice in answer.choices] == ["ab", "cde"]
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
        assert answer.usage.completion_tokens == 0
        for choice, prompt in zip(answer.choices, ("ab", "cde"), strict=True):
            assert "".join(choice.logprobs.tokens) == prompt
        await cluster.settled()

    async def test_streams_begin_with_the_prompt(self, cluster: Cluster) -> None:
        tokens = cluster.says("xyz")
        stream = await cluster.openai.completions.create(
            model=MODEL, prompt=[70, 71], echo=True, logprobs=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
        first = chunks[0].choices[0]
        assert first.text.startswith(cluster.tokenizer.decode([70, 71]))
        offsets = [at for chunk in chunks if chunk.choices[0].logprobs for at in chunk.choices[0].logprobs.text_offset]
        assert len(offsets) == 2 + len(tokens)
        assert offsets == sorted(offsets)

    async def test_a_stop_token_has_its_logprob_as_it_is_counted(self, cluster: Cluster) -> None:
        for worker in (cluster.prefill, cluster.decode):
            worker.behaviour.answer = lambda prompt: [EOS]
        answer = await cluster.openai.completions.create(
            model=MODEL, prompt=[70, 71, 72], echo=True, max_tokens=1, logprobs=1
        )
        assert len(answer.choices[0].logprobs.token_logprobs) == 3 + answer.usage.completion_tokens == 4
        assert answer.choices[0].finish_reason == "stop"

    async def test_an_attempt_that_fails_starts_the_scores_anew(self, cluster: Cluster) -> None:
        tokens = cluster.says("xyz")
        cluster.decode.behaviour.fail_handoffs = 1000
        answer = await cluster.openai.completions.create(model=MODEL, prompt=[70, 71, 72], echo=True, logprobs=1)
        assert len(answer.choices[0].logprobs.tokens) == 3 + len(tokens)
        goes_on = [work for work in cluster.decode.works.values() if work.answer_tokens]
        assert goes_on
        assert not any(work.sampling.HasField("prompt_logprobs") for work in goes_on)


async def test_of_tokens_with_the_same_text_the_likeliest_counts(cluster: Cluster) -> None:
    """Halves of characters all look alike; the best of them must not be hidden by a worse one."""
    euro = cluster.tokenizer.encode("€", add_special_tokens=False)
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: euro
    reply = await cluster.http.post("/v1/completions", json={**COMPLETION, "logprobs": 3})
    tops = reply.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert all(max(top.values()) == -0.5 for top in tops)


class TestRequestId:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing", "/health"])
    async def test_every_answer_has_one_and_repeats_the_clients(self, cluster: Cluster, path: str) -> None:
        method = "POST" if path.endswith("completions") else "GET"
        ours = await cluster.http.request(method, path, json=COMPLETION)
        assert len(ours.headers["x-request-id"]) == 24
        theirs = await cluster.http.request(method, path, json=COMPLETION, headers={"x-request-id": "my-id.7"})
        assert theirs.headers.get_list("x-request-id") == ["my-id.7"]

    async def test_ours_is_in_the_answer_and_the_clients_goes_no_further(self, cluster: Cluster) -> None:
        reply = await cluster.http.post("/v1/completions", json=COMPLETION)
        assert reply.json()["id"] == f"cmpl-{reply.headers['x-request-id']}"
        named = await cluster.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine"})
        assert "mine" not in named.json()["id"]
        assert not any("mine" in wire_id for wire_id in cluster.decode.works)

    @pytest.mark.parametrize("given", ["a b", "x" * 129, "é", ""])
    async def test_a_strange_one_is_replaced(self, cluster: Cluster, given: str) -> None:
        reply = await cluster.http.get("/health", headers=[(b"x-request-id", given.encode())])
        assert reply.headers["x-request-id"] != given

    async def test_errors_and_streams_have_it_too(self, cluster: Cluster) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await cluster.openai.completions.create(model=MODEL, prompt="", extra_headers={"x-request-id": "abc"})
        assert caught.value.request_id == "abc"
        reply = await cluster.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        first = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))
        assert first["id"] == f"cmpl-{reply.headers['x-request-id']}"


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({"echo": True, "logprobs": 1, "max_tokens": 1}, 4 * 2 * (3 + 1)),
        ({"logprobs": 2, "max_tokens": 5}, 4 * 3 * 5),
        ({"logprobs": 2}, 4 * 3 * 16),  # without `max_tokens`
    ],
)
@pytest.mark.acceptance(39, here="products of limits")
async def test_the_logprobs_of_all_answers_together_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], count: int
) -> None:
    """Two prompts of three tokens with two choices each."""
    cluster.says("ok")
    call = {"model": MODEL, "prompt": [[70, 71, 72], [73, 74, 75]], "n": 2, **more}
    monkeypatch.setattr(answer_limits, "MAX_CALL_LOGPROBS", count - 1)
    with pytest.raises(openai.BadRequestError, match=rf"logprobs: expected at most {count - 1} .* got {count} "):
        await cluster.openai.completions.create(**call)
    assert not cluster.decode.works, "none of them may run"
    monkeypatch.setattr(answer_limits, "MAX_CALL_LOGPROBS", count)
    answer = await cluster.openai.completions.create(**call)
    assert len(answer.choices) == 4
    await cluster.settled()


async def test_an_answer_with_logprobs_and_no_max_tokens_gets_as_many_as_fit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.says("ok")
    monkeypatch.setattr(answer_limits, "LEAST_OPEN_TOKENS", 20)
    monkeypatch.setattr(answer_limits, "MAX_CALL_LOGPROBS", 4 * 3 * 25)
    create = cluster.openai.chat.completions.create
    call = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 4}
    await create(**call, logprobs=True, top_logprobs=2)
    assert [work.sampling.max_tokens for work in cluster.decode.works.values()] == [25] * 4
    await create(**call)
    rest = [512 - len(work.prompt) for work in cluster.decode.works.values()][4:]
    assert [work.sampling.max_tokens for work in cluster.decode.works.values()][4:] == rest
    monkeypatch.setattr(answer_limits, "MAX_CALL_LOGPROBS", 4 * 3 * 19)
    with pytest.raises(openai.BadRequestError, match="logprobs: expected at most 228 "):
        await create(**call, logprobs=True, top_logprobs=2)
    await cluster.settled()


async def test_the_request_that_made_700_mb_of_json_is_refused(cluster: Cluster) -> None:
    call = {"model": MODEL, "prompt": [70] * 400, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="lower n, logprobs or max_tokens"):
        await cluster.openai.completions.create(**call)


class TestSlices:
    """What one turn of the event loop submits."""

    @pytest.mark.parametrize(
        ("asked", "count", "at_once"),
        [
            ({"prompt": "Hi", "n": 30}, 30, 3),
            ({"prompt": ["Hi"] * 30}, 30, 3),
            ({"prompt": "Hi", "n": 6, "logit_bias": {f"{each}": 1 for each in range(256)}}, 6, 2),
        ],
        ids=["choices", "prompts", "logit_bias"],
    )
    async def test_other_requests_have_their_turns_while_many_answers_are_submitted(
        self, cluster: Cluster, asked: dict[str, Any], count: int, at_once: int
    ) -> None:
        cluster.prefill.behaviour.hold_prefills = True
        dispatcher, seen = cluster.app.dispatcher, [0]

        async def watch() -> None:
            while True:
                seen.append(dispatcher.active)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        client = asyncio.create_task(cluster.http.post("/v1/completions", json={"model": MODEL, **asked}))
        await until(lambda: dispatcher.active == count)
        for task in (watcher, client):
            task.cancel()
        assert max(after - before for before, after in pairwise(seen)) == at_once
        await cluster.settled()

    async def test_a_caller_that_leaves_meanwhile_cancels_those_submitted(self, cluster: Cluster) -> None:
        cluster.prefill.behaviour.hold_prefills = True
        app, raw = cluster.app, RawRequest(MODEL, "Hi", RawSampling())
        caller = asyncio.create_task(app.service.submit_all([raw], 50, "r"))
        while not app.dispatcher.active:  # the next turn submits more
            await asyncio.sleep(0)
        assert app.dispatcher.active < 50
        caller.cancel()
        await asyncio.wait([caller])
        assert app.dispatcher.active == 0
        await cluster.settled()
