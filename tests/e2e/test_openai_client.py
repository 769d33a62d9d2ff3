"""The official client against a whole cluster: what it may ask, what it is told, and when it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Golden

pytestmark = pytest.mark.e2e
MODEL = "smollm2-135m"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client() as client:
        yield client


def test_chat_answers_with_the_reference_text(client: openai.OpenAI, golden: list[Golden]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(golden[0].prompt), temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(golden[0].prompt_ids)
    assert answer.usage.completion_tokens == len(golden[0].greedy_ids)


def test_chat_streams_the_same_text_with_usage_at_the_end(client: openai.OpenAI, golden: list[Golden]) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user(golden[0].prompt),
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(golden[0].greedy_ids)


def test_completions_take_text_and_token_ids_alike(client: openai.OpenAI, golden: list[Golden]) -> None:
    for prompt in (golden[0].text, golden[0].prompt_ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=32)
        assert answer.choices[0].text == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"


def test_completions_stream(client: openai.OpenAI, golden: list[Golden]) -> None:
    stream = client.completions.create(model=MODEL, prompt=golden[0].text, temperature=0, max_tokens=32, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "The capital of France is Paris."


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    question = user("Which river flows through Vienna, and which through Prague?")
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 32


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, golden: list[Golden]) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(golden[0].prompt), temperature=0, max_tokens=32, stop=["of France"]
    )
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"


def test_a_prediction_has_no_effect_on_workers_that_do_not_speculate(
    client: openai.OpenAI, golden: list[Golden]
) -> None:
    """tests/clients asks workers that do."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(golden[0].prompt),
        temperature=0,
        prediction={"type": "content", "content": "The capital of France is Lyon."},
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


def test_max_tokens_ends_the_answer_with_length(client: openai.OpenAI, golden: list[Golden]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(golden[0].prompt), temperature=0, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answer_and_another_seed_another(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=user("Tell me a story."), temperature=1.0, seed=seed, max_tokens=12
        )
        return answer.choices[0].message.content

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in (7, 8, 9)}) > 1


def test_a_bias_bans_and_forces_tokens(client: openai.OpenAI, golden: list[Golden]) -> None:
    def ask(**more: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=golden[0].text, temperature=0, max_tokens=6, extra_body={"ignore_eos": True}, **more
        )
        return str(answer.choices[0].text)

    first = golden[0].greedy_ids[0]
    assert not ask(logit_bias={str(first): -100}).startswith("The")
    assert ask(logit_bias={str(first): 100}) == "The" * 6


@pytest.mark.slow
def test_penalties_keep_tokens_from_coming_back(client: openai.OpenAI, golden: list[Golden]) -> None:
    def distinct(**more: Any) -> int:
        answer = client.completions.create(
            model=MODEL, prompt="one one one one one", temperature=0, max_tokens=24, logprobs=0, **more
        )
        assert answer.choices[0].logprobs is not None
        return len(set(answer.choices[0].logprobs.tokens or ()))

    plain = distinct()
    assert distinct(frequency_penalty=2.0, presence_penalty=2.0) > plain
    assert distinct(extra_body={"repetition_penalty": 2.0}) > plain


def test_logprobs_of_chat_and_completions(client: openai.OpenAI, golden: list[Golden]) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=user(golden[0].prompt), temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [token.token for token in content] == ["The", " capital", " of"]
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)
    text = client.completions.create(model=MODEL, prompt=golden[0].text, temperature=0, max_tokens=3, logprobs=2)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens == ["The", " capital", " of"]


def test_choices_and_prompts_are_answered_each_in_its_place(client: openai.OpenAI, golden: list[Golden]) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[entry.text for entry in golden], n=2, temperature=0, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == list(range(2 * len(golden)))
    for number, entry in enumerate(golden):
        first, second = answer.choices[2 * number : 2 * number + 2]
        assert first.text == second.text
        assert entry.greedy_text.startswith(first.text)
    told = client.chat.completions.create(
        model=MODEL, messages=user("Tell me a story."), temperature=1.0, seed=7, n=3, max_tokens=12
    )
    assert len({choice.message.content for choice in told.choices}) > 1


def test_what_evaluations_read_of_a_prompt(client: openai.OpenAI, golden: list[Golden]) -> None:
    """As lm-eval's local-completions scores a continuation: echo, one token, and the logprobs from the context on."""
    context, answer = golden[0].prompt_ids, golden[0].greedy_ids
    for _ in range(2):  # the second time the prefix is cached
        scored = client.completions.create(
            model=MODEL,
            prompt=[[*context, *answer], [*context, *reversed(answer)]],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
        sums, greedy = [], []
        for choice in sorted(scored.choices, key=lambda choice: choice.index):
            assert choice.logprobs is not None
            own = (choice.logprobs.token_logprobs or [])[len(context) : -1]
            tops = (choice.logprobs.top_logprobs or [])[len(context) : -1]
            assert len(own) == len(tops) == len(answer)
            sums.append(sum(own))
            greedy.append(all(each == max(top.values()) for each, top in zip(own, tops, strict=True)))
        assert greedy == [True, False]
        assert sums[0] > sums[1] + 10
    alone = client.completions.create(model=MODEL, prompt=context, max_tokens=0, logprobs=1, echo=True)
    assert alone.choices[0].text == golden[0].text
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_the_responses_api_answers_and_streams(client: openai.OpenAI, golden: list[Golden]) -> None:
    answer = client.responses.create(model=MODEL, input=golden[0].prompt, temperature=0, max_output_tokens=32)
    assert (answer.output_text, answer.status) == ("The capital of France is Paris.", "completed")
    with client.responses.stream(model=MODEL, input=golden[0].prompt, temperature=0) as stream:
        assert stream.get_final_response().output_text == "The capital of France is Paris."
    *_, last = client.responses.create(
        model=MODEL, input=golden[0].prompt, temperature=0, max_output_tokens=3, stream=True
    )
    assert last.type == "response.incomplete"
    assert last.response.output_text == "The capital of"


def test_tokens_of_a_text_and_back(cluster: Cluster, golden: list[Golden]) -> None:
    with httpx.Client(base_url=cluster.base_url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"model": MODEL, "prompt": golden[0].text}).json()["tokens"]
        assert tokens == golden[0].prompt_ids
        text = http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"]
    assert text == golden[0].text


def test_an_answer_repeats_the_clients_request_id(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hi", max_tokens=1, extra_headers={"x-request-id": "my-own"}
    )
    assert answer.headers["x-request-id"] == "my-own"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_closing_a_stream_cancels_the_request(cluster: Cluster, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user("Count to a thousand."), temperature=0, max_tokens=1000, stream=True
    )
    next(iter(stream))
    stream.close()
    cluster.assert_conserved()


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user("Hi"),
        max_completion_tokens=1,
        n=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"n": 1000}, "n"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_is_wrong_is_refused_and_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": user("Hi"), "max_tokens": 4}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**(request | change))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_model_is_a_404_that_names_those_there_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="nobody", messages=user("Hi"))


@pytest.mark.acceptance(19, here="a prompt of too many tokens")
def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"
    assert "9000" in str(refused.value)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff\xfe", b""])
def test_a_body_that_is_no_request_is_refused(cluster: Cluster, body: bytes) -> None:
    answer = httpx.post(f"{cluster.base_url}/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
async def test_sixteen_streams_get_the_right_tokens(cluster: Cluster, golden: list[Golden]) -> None:
    async with cluster.async_client() as client:

        async def ask(entry: Golden) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=entry.prompt_ids, temperature=0, max_tokens=32, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        expected = [await ask(entry) for entry in golden]
        assert expected[0] == "The capital of France is Paris."
        answers = await asyncio.gather(*(ask(golden[number % 3]) for number in range(16)))
    assert answers == [expected[number % 3] for number in range(16)]
    cluster.assert_conserved()
