"""Pydantic AI."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic_ai import Agent, NativeOutput, RunContext, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.asks import FRANCE, MODEL, PARIS, City

if TYPE_CHECKING:
    from tests.clients.conftest import Server

GREEDY: Any = {"temperature": 0.0}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    return request.param(MODEL, provider=OpenAIProvider(**server.openai))


def test_chat(model: Any) -> None:
    assert Agent(model, model_settings=GREEDY).run_sync(FRANCE).output == PARIS


async def stream(model: Any) -> str:
    async with Agent(model, model_settings=GREEDY).run_stream(FRANCE) as answer:
        return "".join([part async for part in answer.stream_text(delta=True)])


def test_stream(model: Any) -> None:
    assert asyncio.run(stream(model)) == PARIS


@pytest.mark.parametrize("output", [City, NativeOutput(City)], ids=["tool", "native"])
def test_structured_answer(model: Any, output: Any) -> None:
    answer = Agent(model, output_type=output, model_settings=GREEDY).run_sync("Describe Oslo as JSON.")
    assert isinstance(answer.output, City)


def test_agent_of_three_turns(model: Any) -> None:
    def settings(run: RunContext[None]) -> Any:
        return GREEDY | {
            "tool_choice": ["get_weather"] if run.run_step <= 2 else "none",
            "max_tokens": 64,
            "parallel_tool_calls": False,
        }

    agent = Agent(model, model_settings=settings)
    asked: list[str] = []

    @agent.tool_plain  # type: ignore[untyped-decorator, unused-ignore]
    def get_weather(city: str) -> str:
        """Weather of a city"""
        asked.append(city)
        return "Sunny, 20 degrees."

    answer = agent.run_sync("Compare the weather in Oslo and Paris.", usage_limits=UsageLimits(request_limit=3))
    assert len(asked) >= 2
    assert answer.output
    assert answer.usage.requests == 3
