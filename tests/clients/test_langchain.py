"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.asks import FRANCE, MODEL, PARIS, City

if TYPE_CHECKING:
    from tests.clients.conftest import Server


@tool  # type: ignore[untyped-decorator, unused-ignore]
def get_weather(city: str) -> str:
    """Weather of a city"""
    return f"{city}: sunny, 20 degrees."


@pytest.fixture
def model(server: Server) -> Any:
    return ChatOpenAI(model=MODEL, temperature=0, **server.openai)


def test_chat(model: Any) -> None:
    assert model.invoke(FRANCE).content == PARIS


def test_batch(model: Any) -> None:
    assert [answer.content for answer in model.batch([FRANCE, FRANCE])] == [PARIS, PARIS]


def test_stream(model: Any) -> None:
    chunks = list(model.stream(FRANCE, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == PARIS
    assert any(chunk.usage_metadata for chunk in chunks)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_answer(model: Any, method: str) -> None:
    assert isinstance(model.with_structured_output(City, method=method).invoke("Describe Oslo as JSON."), City)


def test_streamed_tools(model: Any) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    first, *rest = bound.stream("What is the weather in Oslo?")
    for chunk in rest:
        first += chunk
    (call,) = first.tool_calls
    assert call["name"] == "get_weather"
    assert list(call["args"]) == ["city"]


def test_agent_of_three_turns(model: Any) -> None:
    messages: list[Any] = [HumanMessage("Compare the weather in Oslo and Paris.")]
    for choice in ("any", "get_weather", "none"):
        answer = model.bind_tools([get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False).invoke(
            messages, max_tokens=64
        )
        assert bool(answer.tool_calls) == (choice != "none")
        messages.append(answer)
        for call in answer.tool_calls:
            result = get_weather.invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)
    assert answer.content


def test_responses(server: Server) -> None:
    model = ChatOpenAI(model=MODEL, temperature=0, use_responses_api=True, **server.openai)
    assert model.invoke(FRANCE).text == PARIS
    assert "".join(chunk.text for chunk in model.stream(FRANCE)) == PARIS


def test_text_completion(server: Server) -> None:
    answer = OpenAI(model=MODEL, temperature=0, max_tokens=4, **server.openai).invoke("The capital of France is")
    assert "Paris" in answer
