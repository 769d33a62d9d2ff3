"""Phi-4-mini, in either of two forms:

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>

A call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.json_calls import JsonCalls

_END = "<|/tool_call|>"
PHI4 = JsonCalls("phi4", triggers=("functools[", "<|tool_call|>"), read_ends=(_END,), is_list=True)
