"""LiteLLM, through its provider `openai/`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import litellm
import pytest

from tests.clients.asks import FRANCE, MODEL, PARIS, WEATHER, City, user

if TYPE_CHECKING:
    from tests.clients.conftest import Server

CITIES = ("Paris", "Oslo")


@pytest.fixture
def asked(server: Server) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "temperature": 0, **server.openai}


def test_chat(asked: dict[str, Any]) -> None:
    assert litellm.completion(messages=user(FRANCE), **asked).choices[0].message.content == PARIS


def test_stream(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=user(FRANCE), stream=True, **asked))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == PARIS


def test_structured_answer(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user("Describe Oslo as JSON."), response_format=City, **asked)
    City.model_validate_json(answer.choices[0].message.content)


def test_streamed_tools(asked: dict[str, Any]) -> None:
    messages = user("What is the weather in Oslo?")
    chunks = list(
        litellm.completion(
            messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, stream=True, **asked
        )
    )
    (call,) = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES


def test_agent_of_three_turns(asked: dict[str, Any]) -> None:
    messages = user("Compare the weather in Oslo and Paris.")
    one = {"parallel_tool_calls": False}
    for choice in ("required", "required", "none"):
        answer = litellm.completion(
            messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=64, **one, **asked
        )
        message = answer.choices[0].message
        assert bool(message.tool_calls) == (choice == "required")
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."})
    assert message.content


def test_text_completion(asked: dict[str, Any]) -> None:
    answer = litellm.text_completion(
        prompt="The capital of France is", max_tokens=4, **asked | {"model": f"text-completion-openai/{MODEL}"}
    )
    assert "Paris" in answer.choices[0].text


def test_responses(asked: dict[str, Any]) -> None:
    answer = litellm.responses(input=FRANCE, api_base=asked["base_url"], **asked)
    assert answer.output[-1].content[0].text == PARIS
