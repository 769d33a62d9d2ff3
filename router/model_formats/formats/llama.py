"""Llama 3.1, 3.2 and 3.3 as JSON, with or without the marker, and several separated by `;`:

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}

Llama 3.2 and others (Gemma 3, ToolACE) as a Python list, and Llama 4 either way, also between `<|python_start|>` and
`<|python_end|>`:

    [get_weather(city="Paris", days=2), now()]

Without a marker, a call is only one at the beginning of the answer: anywhere else it is text. JSON is committed to at
the opening brace of the parameters, Python at the first `key=` or at `)`.
"""

from __future__ import annotations

from router.model_formats.shapes.json_calls import JsonCalls
from router.model_formats.shapes.pythonic import PythonicCalls
from router.model_formats.shapes.tool_format import Either

LLAMA3_JSON = JsonCalls(
    "llama3_json", triggers=("<|python_tag|>",), separator=";", is_bare=True, arguments_key="parameters"
)
PYTHONIC = PythonicCalls("pythonic")
_LLAMA4_JSON = JsonCalls(
    "llama4_json",
    triggers=("<|python_start|>",),
    end="<|python_end|>",
    separator=";",
    is_bare=True,
    arguments_key="parameters",
)
_LLAMA4_PYTHONIC = PythonicCalls("llama4_pythonic", triggers=("<|python_start|>",), end="<|python_end|>")
LLAMA4_JSON = Either("llama4_json", _LLAMA4_JSON, _LLAMA4_PYTHONIC)
LLAMA4_PYTHONIC = Either("llama4_pythonic", _LLAMA4_PYTHONIC, _LLAMA4_JSON)
