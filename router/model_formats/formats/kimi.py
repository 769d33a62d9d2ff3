"""Kimi K2:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

without the line break. `functions.get_weather:0` is the call's id, which the model expects to see again. A call is
committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.named_calls import NamedCalls

KIMI_K2 = NamedCalls(
    "kimi_k2",
    section_marks=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    prefix="functions.",
    arguments=("<|tool_call_argument_begin|>",),
    ends=("<|tool_call_end|>",),
    is_numbered=True,
)
