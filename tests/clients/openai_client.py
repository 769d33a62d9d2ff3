"""What each version of OpenAI's Python client asks of TANDEM_HTTP; fails if an answer is not as expected."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai

from tests.clients.asks import FRANCE, MODEL, PARIS, WEATHER, City, user


def chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(FRANCE), temperature=0)
    assert answer.choices[0].message.content == PARIS, answer


def stream(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=user(FRANCE), temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS


async def asynchronous_stream(client: openai.AsyncOpenAI) -> None:
    async with client:
        chunks = await client.chat.completions.create(model=MODEL, messages=user(FRANCE), temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == PARIS


def predicted(client: openai.OpenAI) -> None:
    """The prediction is right but for its end, or wrong; the answer is the same."""
    for content, accepted in ((PARIS + " It is on the Seine.", range(1, 9)), ("Oslo is in Norway.", range(1))):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=user(FRANCE),
            temperature=0,
            prediction={"type": "content", "content": content},
        )
        assert answer.choices[0].message.content == PARIS, answer
        assert answer.usage is not None, answer
        assert answer.usage.completion_tokens_details is not None, answer
        assert (answer.usage.completion_tokens_details.accepted_prediction_tokens or 0) in accepted, answer


def structured(client: openai.OpenAI) -> None:
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    answer = parse(model=MODEL, messages=user("Describe Oslo as JSON."), temperature=0, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City), answer


def streamed_tools(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=user("What is the weather in Oslo?"),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        stream=True,
    )
    name, arguments, reason = "", "", None
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            name += (call.function and call.function.name) or ""
            arguments += (call.function and call.function.arguments) or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, reason) == ("get_weather", "tool_calls")
    assert json.loads(arguments)["city"] in ("Paris", "Oslo")


def agent(client: openai.OpenAI) -> None:
    """Two turns with calls, whose results go back, and one of text."""
    messages = user("Compare the weather in Oslo and Paris.")
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "none"):
        sent: Any = choice
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[WEATHER],
            tool_choice=sent,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=64,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."})
    assert [type(each).__name__ for each in messages].count("ChatCompletionMessage") == 3
    assert sum(isinstance(each, dict) and each["role"] == "tool" for each in messages) >= 2, messages
    assert message.content, message


def responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=FRANCE, temperature=0)
    assert answer.output_text == PARIS, answer
    *_, last = client.responses.create(model=MODEL, input=FRANCE, temperature=0, stream=True)
    assert last.type == "response.completed", last
    parsed = client.responses.parse(model=MODEL, input="Describe Oslo as JSON.", temperature=0, text_format=City)
    assert isinstance(parsed.output_parsed, City), parsed


def main() -> None:
    url = os.environ["TANDEM_HTTP"] + "/v1"
    client = openai.OpenAI(base_url=url, api_key="none")
    for ask in (chat, stream, predicted, structured, streamed_tools, agent, responses):
        ask(client)
    asyncio.run(asynchronous_stream(openai.AsyncOpenAI(base_url=url, api_key="none")))
    print(f"openai {openai.__version__}: ok")


if __name__ == "__main__":
    main()
