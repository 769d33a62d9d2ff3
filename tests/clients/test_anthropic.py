"""Anthropic's client, on its Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from tests.clients.asks import FRANCE, MODEL, PARIS, WEATHER, City, user

if TYPE_CHECKING:
    from tests.clients.conftest import Server

FUNCTION = WEATHER["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "strict": True,
}


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none")


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": user(FRANCE), "max_tokens": 64, "extra_body": {"temperature": 0}, **fields}


def test_chat(client: anthropic.Anthropic) -> None:
    (block,) = client.messages.create(**ask()).content
    assert block.type == "text"
    assert block.text == PARIS


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ask()) as stream:
        assert "".join(stream.text_stream) == PARIS
        assert stream.get_final_message().stop_reason == "end_turn"


def test_structured_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(**ask(messages=user("Describe Oslo as JSON."), output_format=City))
    assert isinstance(answer.parsed_output, City)


def test_streamed_tools(client: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = ask(messages=user("What is the weather in Oslo?"), tools=[TOOL], tool_choice=choice)
    with client.messages.stream(**asked) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    assert {block.name for block in answer.content if block.type == "tool_use"} == {"get_weather"}


def test_agent_of_three_turns(client: anthropic.Anthropic) -> None:
    messages = user("Compare the weather in Oslo and Paris.")
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather"},
        {"type": "none"},
    ]
    for choice in choices:
        answer = client.messages.create(**ask(messages=messages, tools=[TOOL], tool_choice=choice))
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert bool(calls) == (choice["type"] != "none")
        messages.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees."} for call in calls]
        if results:
            messages.append({"role": "user", "content": results})
    assert any(block.type == "text" and block.text for block in answer.content)


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user(FRANCE))
    usage = client.messages.create(**ask()).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
