"""Each cost of one request has a bound. A request at its bound is answered; one beyond it is refused by name, before a
worker has it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.edge.body_parsing import MAX_KEYS
from router.edge.limits.bodies import EXEMPT_BYTES
from router.edge.openai.answer_format import ChatFormat, CompletionFormat
from router.edge.openai.request_schema import MAX_CHOICES, UsageEvents
from router.requests import answer_limits, serving_model
from router.requests.answers import Answers, Arrival, SubmittedRequest, WholeAnswer
from router.requests.output import Final, OutToken, ResponseStream, TextPiece, Usage
from router.requests.raw_request import MAX_CACHE_SALT_CHARS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, ValidRequest
from router.requests.serving_model import INLINE_PROMPT_CHARS, ServingModel
from router.texts.chat import MAX_MESSAGES, Chat, Message
from tandem.config.router import Disaggregation, RouterSpec
from tandem.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, FinishReason, SamplingParams, TokenLogprob
from tandem.v1 import inference_pb2
from tests.unit.router.conftest import MODEL, Cluster

CONTEXT_TOKENS = 512
TINY_VOCAB_TOKENS = 320
BODY_BYTES = 1 << 20
ANSWER = "fine"
MESSAGE = {"role": "user", "content": "Hi"}


@pytest.fixture
def spec() -> RouterSpec:
    always = Disaggregation.ALWAYS
    return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, queue_timeout_s=30.0, max_body_bytes=BODY_BYTES)


@pytest.fixture
async def cluster(bare: Cluster) -> Cluster:
    """With room for the largest requests."""
    for worker in (bare.prefill, bare.decode):
        worker.total_blocks = 1 << 16
    await bare.list_workers(bare.prefill, bare.decode)
    return bare


@dataclass(frozen=True)
class Cost:
    """`make` gives a body that costs so much. `bounds`: smaller ones than the router's, so that a test stays quick."""

    name: str
    bound: int
    make: Callable[[int], dict[str, Any]]
    names: str  # the field of the error
    path: str = "/v1/completions"
    bounds: dict[str, int] = field(default_factory=dict)
    is_answered: bool = True  # False: the bound itself exceeds another one


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 8, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [MESSAGE], "max_tokens": 8, **more}


def biases(count: int) -> dict[str, float]:
    """The tiny model has few tokens: the same ones again, with more zeros before them."""
    return {f"{each % 300:0{3 + each // 300}d}": 0.0 for each in range(count)}


CHAT = "/v1/chat/completions"
COSTS = [
    Cost("choices", MAX_CHOICES, lambda n: completion(n=n), "n"),
    Cost("choices of a chat", MAX_CHOICES, lambda n: chat(n=n), "n", CHAT),
    Cost("prompts", MAX_CHOICES, lambda n: completion(prompt=["Hi"] * n), "prompt"),
    Cost("prompts times n", MAX_CHOICES // 2, lambda n: completion(prompt=["a", "b"], n=n), "prompt"),
    Cost("logprobs", MAX_LOGPROBS, lambda n: completion(logprobs=n), "logprobs"),
    Cost("logprobs of a chat", MAX_LOGPROBS, lambda n: chat(logprobs=True, top_logprobs=n), "top_logprobs", CHAT),
    Cost(
        "logprobs times n times max_tokens",
        answer_limits.MAX_CALL_LOGPROBS // (MAX_CHOICES * 21),
        lambda n: completion(n=MAX_CHOICES, logprobs=20, max_tokens=n),
        "logprobs",
    ),
    Cost(
        "logprobs of a chat times n without max_tokens",
        3,
        lambda n: chat(n=n, logprobs=True, top_logprobs=9, max_tokens=None),
        "logprobs",
        CHAT,
        {"MAX_CALL_LOGPROBS": 3 * 10 * CONTEXT_TOKENS},
    ),
    Cost(
        "logprobs of the prompt times n",
        99,
        lambda n: completion(n=2, logprobs=4, echo=True, max_tokens=1, prompt=[70] * n),
        "logprobs",
        bounds={"MAX_CALL_LOGPROBS": 1000},
    ),
    Cost(
        "logprobs of one prompt",
        100,
        lambda n: completion(logprobs=4, echo=True, prompt=[70] * n),
        "prompt",
        bounds={"MAX_PROMPT_SCORES": 500},
    ),
    Cost(
        "echo times n",
        25,
        lambda n: completion(n=4, echo=True, prompt="x" * n),
        "echo",
        bounds={"MAX_CALL_ECHO_CHARS": 100},
    ),
    Cost(
        "echo of token ids times n",
        25,
        lambda n: completion(n=4, echo=True, prompt=[70] * n),
        "echo",
        bounds={"MAX_CALL_ECHO_CHARS": 100},
    ),
    Cost("stop strings", MAX_STOP_STRINGS, lambda n: completion(stop=[f"{each}" for each in range(n)]), "stop"),
    Cost("length of a stop string", MAX_STOP_STRING_CHARS, lambda n: completion(stop=["x" * n]), "stop"),
    Cost("stop token ids", MAX_STOP_TOKEN_IDS, lambda n: completion(stop_token_ids=[1] * n), "stop_token_ids"),
    Cost("logit_bias", MAX_LOGIT_BIAS, lambda n: completion(logit_bias=biases(n)), "logit_bias"),
    Cost("keys of an object", MAX_KEYS, lambda n: chat(metadata={f"{each}": "" for each in range(n)}), "body", CHAT),
    Cost("messages", MAX_MESSAGES, lambda n: chat(messages=[MESSAGE] * n), "messages", CHAT, is_answered=False),
    Cost("token ids", TINY_VOCAB_TOKENS - 1, lambda n: completion(prompt=[n]), "prompt"),
    Cost("context", CONTEXT_TOKENS - 1, lambda n: completion(prompt=[70] * n, max_tokens=1), "prompt"),
    Cost("max_tokens", CONTEXT_TOKENS - 3, lambda n: completion(prompt=[70] * 3, max_tokens=n), "max_tokens"),
    Cost("seed", 2**64 - 1, lambda n: completion(seed=n), "seed"),
    Cost("top_k", 2**31 - 1, lambda n: completion(top_k=n), "top_k"),
    Cost("cache_salt", MAX_CACHE_SALT_CHARS, lambda n: completion(cache_salt="s" * n), "cache_salt"),
]


@pytest.mark.acceptance(39, here="each limit and product of limits, one below, at and one beyond")
@pytest.mark.parametrize("more", [-1, 0, 1], ids=["below", "at", "beyond"])
@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name.replace(" ", "_"))
async def test_a_cost_is_answered_up_to_its_bound_and_refused_by_name_beyond_it(
    cluster: Cluster, cost: Cost, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cost.bounds.items():
        monkeypatch.setattr(serving_model if name == "MAX_PROMPT_SCORES" else answer_limits, name, value)
    cluster.says(ANSWER)
    body = {"model": MODEL, **cost.make(cost.bound + more)}
    reply = await cluster.http.post(cost.path, json=body)
    if more <= 0 and cost.is_answered:
        assert reply.status_code == 200, reply.text
        check_answer(cluster, body, reply.json())
        await cluster.settled()
        return
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(cost.names)
    assert error["param"] == (None if cost.names == "body" else cost.names)
    assert len(error["message"]) < 300
    assert not cluster.prefill.works
    assert not cluster.decode.works


def check_answer(cluster: Cluster, body: dict[str, Any], answer: dict[str, Any]) -> None:
    prompts = body.get("prompt", "")
    if not isinstance(prompts, list) or isinstance(prompts[0], int):
        prompts = [prompts]
    choices = body.get("n", 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts) * choices))
    said = ANSWER[: body["max_tokens"]]
    for choice in answer["choices"]:
        prompt = prompts[choice["index"] // choices]
        echo = prompt if isinstance(prompt, str) else cluster.tokenizer.decode(prompt)
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == (echo if body.get("echo") else "") + said
        assert choice["finish_reason"] == "length"
        assert (choice["logprobs"] is not None) == (body.get("logprobs") is not None)


@pytest.mark.parametrize(("more", "status"), [(-1, 200), (0, 200), (1, 413)])
async def test_a_body_is_read_up_to_its_bound(cluster: Cluster, more: int, status: int) -> None:
    cluster.says(ANSWER)
    reply = await cluster.http.post("/v1/completions", content=padded(BODY_BYTES + more))
    assert reply.status_code == status
    assert status == 200 or reply.json()["error"]["message"].startswith("body: expected at most")


@pytest.mark.parametrize(("more", "status"), [(-1, 200), (0, 200), (1, 429)])
async def test_bodies_are_read_up_to_their_budget(
    cluster: Cluster, more: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.app.bodies, "_max_bytes", 1000)
    cluster.says(ANSWER)
    reply = await cluster.http.post("/v1/completions", content=padded(EXEMPT_BYTES + 1000 + more))
    assert reply.status_code == status
    assert status == 200 or reply.json()["error"]["message"].startswith("body: the bodies that the router receives")
    assert cluster.app.bodies.held_bytes == 0


def padded(count: int) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "Hi"}).encode().rjust(count)


@pytest.mark.parametrize("number", [10**19, 10**400, 10**4000])
async def test_two_limits_that_differ_are_told_briefly(cluster: Cluster, number: int) -> None:
    body = {"model": MODEL, "messages": [MESSAGE], "max_tokens": number, "max_completion_tokens": number + 1}
    reply = await cluster.http.post(CHAT, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "max_completion_tokens"
    assert len(error["message"]) < 200


async def test_between_two_prompts_the_event_loop_is_free(cluster: Cluster) -> None:
    """Each is short enough to be parsed on it, and 128 are not."""
    cluster.says(ANSWER)
    parsed: list[int] = []
    turns: list[int] = []
    loop, model = asyncio.get_running_loop(), cluster.app.service.models.by_name[MODEL]
    parse = model.tokens

    def count_turn() -> None:
        turns.append(len(parsed))
        if len(parsed) < MAX_CHOICES:
            loop.call_soon(count_turn)

    def tokens(*given: Any, **more: Any) -> tuple[int, ...]:
        if not parsed:
            loop.call_soon(count_turn)
        parsed.append(len(turns))
        return parse(*given, **more)

    model.tokens = tokens  # type: ignore[method-assign]
    await cluster.openai.completions.create(model=MODEL, prompt=["Hi"] * MAX_CHOICES, max_tokens=1)
    assert len(parsed) == MAX_CHOICES
    assert all(after > before for before, after in pairwise(parsed))


class Letters:
    """Each token is one letter."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + each % 26) for each in ids)

    def fixed_text(self, token_id: int) -> str | None:
        return chr(97 + token_id % 26)


@dataclass(frozen=True)
class Call:
    """What a client asks for, and how many tokens each answer then has."""

    prompts: list[int]
    choices: int
    logprobs: int | None
    max_tokens: int
    echo: bool
    answer_tokens: int


calls = st.builds(
    lambda most, share, **more: Call(max_tokens=most, answer_tokens=max(1, most * share // 10), **more),
    most=st.integers(1, 30),
    share=st.integers(0, 10),
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    choices=st.integers(1, 4),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    echo=st.booleans(),
)


def answers_to(call: Call) -> tuple[list[ValidRequest], Answers]:
    model = cast(ServingModel, SimpleNamespace(name=MODEL, tokenizer=Letters()))
    sampling = SamplingParams.parse(
        seed=1,
        max_tokens=call.max_tokens,
        logprobs=call.logprobs,
        prompt_logprobs=call.logprobs if call.echo else None,
    )
    requests = []
    for count in call.prompts:
        prompt = tuple(range(count))
        text = Letters().decode(prompt) if call.echo else None
        requests.append(ValidRequest("r", MODEL, prompt, sampling, (), (), 16, echo=text))
    submitted = []
    for request in requests:
        for choice in range(call.choices):
            stream = ResponseStream("r", lambda: None)
            if sampling.prompt_logprobs is not None and not choice:
                top = [inference_pb2.TopLogprob(token_id=each) for each in range(sampling.prompt_logprobs)]
                scored = [inference_pb2.TokenLogprobs(token_id=each, top=top) for each in request.prompt[1:]]
                stream.prompt_scores = tuple(scored)
            submitted.append(SubmittedRequest(request, model, stream))
    return requests, Answers("r", submitted, call.choices)


def arrivals_of(call: Call) -> list[Arrival]:
    top = tuple(TokenLogprob(each, -1.0) for each in range(call.logprobs or 0))
    token = OutToken(1, None if call.logprobs is None else -0.5, top, False)
    final = Final(FinishReason.LENGTH, Usage(1, call.answer_tokens, 0), cast(Any, None))
    pieces = [TextPiece("b", (token,))] * call.answer_tokens
    return [Arrival(index, pieces, final) for index in range(len(call.prompts) * call.choices)]


@settings(max_examples=60)
@given(calls)
def test_what_is_counted_is_at_least_what_the_answers_hold(call: Call) -> None:
    requests, answers = answers_to(call)
    counted = call.choices * sum(map(answer_limits.max_logprobs, requests))
    wholes = [WholeAnswer() for _ in answers.submitted]
    for arrival in arrivals_of(call):
        wholes[arrival.index].add(arrival)
    form = CompletionFormat(answers, usage=UsageEvents.NONE)
    choices = json.loads(b"".join(form.whole(wholes)))["choices"]
    tops = [top for each in choices if each["logprobs"] for top in each["logprobs"]["top_logprobs"]]
    assert sum(max(1, len(top or ())) for top in tops) <= counted
    assert (counted == 0) == (not tops)
    if call.answer_tokens == call.max_tokens:
        assert len(tops) * (1 + (call.logprobs or 0)) == counted
    if not call.echo:
        chats = json.loads(b"".join(ChatFormat(answers, usage=UsageEvents.NONE, logprobs=True).whole(wholes)))
        entries = [entry for each in chats["choices"] if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert sum(1 + len(entry["top_logprobs"]) for entry in entries) <= counted


@settings(max_examples=60)
@given(calls, st.randoms())
def test_a_stream_gives_what_the_whole_answers_hold_in_whatever_order_its_choices_come(
    call: Call, dice: random.Random
) -> None:
    _, answers = answers_to(call)
    arrivals = arrivals_of(call)
    wholes = [WholeAnswer() for _ in answers.submitted]
    for arrival in arrivals:
        wholes[arrival.index].add(arrival)
    expected = json.loads(b"".join(CompletionFormat(answers, usage=UsageEvents.NONE).whole(wholes)))["choices"]
    parts = [[Arrival(each.index, [piece], None) for piece in each.pieces[:-1]] for each in arrivals]
    for each, rest in zip(arrivals, parts, strict=True):
        rest.append(Arrival(each.index, each.pieces[-1:], each.final))
    order = [index for index, rest in enumerate(parts) for _ in rest]
    dice.shuffle(order)
    form = CompletionFormat(answers, usage=UsageEvents.NONE)
    lines = b"".join(piece for index in order for piece in form.events([parts[index].pop(0)])).split(b"\n\n")
    chunks = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines if line]
    for choice in expected:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        scored = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for each in scored for value in each[name]] == values, name
        assert bool(scored) == bool(choice["logprobs"])


@pytest.mark.parametrize(
    "chat",
    [
        Chat((Message("user", "Hi"),), settings={"date_string": "x" * INLINE_PROMPT_CHARS}),
        Chat((Message("user", "Hi"),), wishes={"format": ["x"] * INLINE_PROMPT_CHARS}),
        Chat((Message("user", ""),) * 200),
    ],
    ids=["a setting of its template", "a wish", "empty messages"],
)
def test_a_chat_that_is_long_to_render_is_rendered_in_a_thread(chat: Chat) -> None:
    assert not serving_model._is_short(chat)
    assert serving_model._is_short(Chat((Message("user", "Hi"),), settings={"enable_thinking": False}))
