"""Granite 3.x; Granite 4 writes Hermes' format:

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Some of its models write `<tool_call>`, and Granite 20B `<function_call> {"name": …}` for each call; they are read too.
A call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.json_calls import JsonCalls

GRANITE = JsonCalls("granite", triggers=("<|tool_call|>", "<tool_call>", "<function_call>"), is_list=True)
