"""What the tests of all clients ask."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "smollm2-135m"
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """Closed and short: the demo model fills what it may."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Oslo", "Paris"]
    large: bool


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
