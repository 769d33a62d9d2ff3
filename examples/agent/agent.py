"""An agent: the model calls tools, their results go back to it, until it answers in text. Needs `pip install openai`.

    python examples/agent/agent.py "What is 6 times 7?"
    python examples/agent/agent.py --calls 2 "What is 6 times 7?"     # the first two turns must call a tool

TANDEM_HTTP: URL of the router (default http://127.0.0.1:8000). TANDEM_API_KEY: the API key, if the router requires one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI, OpenAIError

PLACES = {"Oslo": "Norway, 717,000 people", "Paris": "France, 2,100,000 people", "Vienna": "Austria, 2,000,000 people"}
OPERATORS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}


def calculate(operation: str, left: float, right: float) -> str:
    try:
        return str(OPERATORS[operation](left, right))
    except ArithmeticError as error:
        return f"error: {error}"


def look_up(city: str) -> str:
    return PLACES[city]


def today() -> str:
    return datetime.date.today().isoformat()


def tool(name: str, description: str, **properties: dict[str, Any]) -> Any:
    """A strict tool: its arguments always satisfy this schema, so the functions above need not check them."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


FUNCTIONS: dict[str, Callable[..., str]] = {"calculate": calculate, "look_up": look_up, "today": today}
NUMBER = {"type": "integer", "minimum": -1000000, "maximum": 1000000}
TOOLS = [
    tool("calculate", "Calculates with two numbers", operation={"enum": list(OPERATORS)}, left=NUMBER, right=NUMBER),
    tool("look_up", "Country and size of a city", city={"enum": list(PLACES)}),
    tool("today", "The date of today"),
]


def run(client: OpenAI, question: str, turns: int, calls: int) -> str:
    """The model's answer. The last turn offers no calls, so it is text."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(1, turns + 1):
        choice: Any = "none" if turn == turns else "required" if turn <= calls else "auto"
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=256,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            if call.type == "function":
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
                print(f"{call.function.name} {call.function.arguments} -> {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("the last turn has no calls")


def main() -> int:
    options = argparse.ArgumentParser(description="An agent with three tools")
    options.add_argument("question")
    options.add_argument("--turns", type=int, default=6, help="at most so many answers of the model (default 6)")
    options.add_argument(
        "--calls", type=int, default=0, help="turns that must call a tool, for small models (default 0)"
    )
    given = options.parse_args()
    if given.turns < 1:
        options.error(f"--turns: expected 1 or more, got {given.turns}")
    url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "unused"))
    try:
        print(run(client, given.question, given.turns, given.calls))
    except OpenAIError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
