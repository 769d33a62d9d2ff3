"""The Responses API through the official client: text in, text out, other fields refused by name."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseTextDeltaEvent

from tests.unit.router.conftest import Cluster

MODEL = "tiny"
EOS = 2


def ends_with_eos(cluster: Cluster, text: str) -> list[int]:
    tokens = [*cluster.says(text), EOS]
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: tokens
    return tokens


async def test_text_is_answered_with_text(cluster: Cluster) -> None:
    tokens = ends_with_eos(cluster, "Hello.")
    create = cluster.openai.responses.create
    answer: Response = await create(model=MODEL, input="Hi", instructions="Be kind.", user="me")
    assert (answer.output_text, answer.status, answer.incomplete_details) == ("Hello.", "completed", None)
    assert (answer.object, answer.model, answer.instructions) == ("response", MODEL, "Be kind.")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(tokens)
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(tokens)
    [work] = cluster.decode.works.values()
    prompt = cluster.tokenizer.decode(list(work.prompt), skip_special_tokens=False)
    assert "system\nBe kind." in prompt
    assert "user\nHi" in prompt


async def test_an_answer_cut_at_max_tokens_is_incomplete(cluster: Cluster) -> None:
    cluster.says("a long answer")
    answer = await cluster.openai.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_conversation_goes_in_as_items_also_those_of_an_earlier_answer(cluster: Cluster) -> None:
    ends_with_eos(cluster, "Vienna")
    first = await cluster.openai.responses.create(model=MODEL, input="Where?")
    items = [
        {"role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "Why?"},
    ]
    await cluster.openai.responses.create(model=MODEL, input=items)
    prompt = cluster.tokenizer.decode(list(list(cluster.decode.works.values())[-1].prompt), skip_special_tokens=False)
    places = [prompt.index(part) for part in ("system\nShort.", "user\nWhere?", "assistant\nVienna", "user\nWhy?")]
    assert places == sorted(places)


async def test_the_official_client_reads_the_same_answer_from_the_stream(cluster: Cluster) -> None:
    ends_with_eos(cluster, "Grüße €5")
    events = [event async for event in await cluster.openai.responses.create(model=MODEL, input="Hi", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not isinstance(event, ResponseTextDeltaEvent)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)) == "Grüße €5"
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert last.response.output_text == "Grüße €5"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens > 0
    async with cluster.openai.responses.stream(model=MODEL, input="Hi") as stream:
        assert (await stream.get_final_response()).output_text == "Grüße €5"


async def test_logprobs_come_when_included(cluster: Cluster) -> None:
    ends_with_eos(cluster, "abc")
    answer = await cluster.openai.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs) == "abc"
    assert all(each.logprob == -0.5 and len(each.top_logprobs) == 2 for each in logprobs)


async def test_a_failure_in_mid_stream_is_an_event(cluster: Cluster) -> None:
    cluster.says("a long answer")
    cluster.decode.behaviour.fail_decodes = 10_000
    reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True})
    assert "event: error\n" in reply.text
    assert reply.text.rstrip().rsplit("event: ", 1)[1].startswith("response.failed\n")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["no.such_part"]}, "include"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(cluster: Cluster, extra: dict[str, Any], param: str) -> None:
    reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | extra)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
            "input.0.content.0.image_url",
        ),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input.0.y"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
async def test_a_bad_field_is_named(cluster: Cluster, extra: dict[str, Any], param: str) -> None:
    reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | extra)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_nothing_is_stored(cluster: Cluster) -> None:
    answer = await cluster.openai.responses.create(model=MODEL, input="Hi", store=True)
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.responses.retrieve(answer.id)
