"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and many others whose template says `<tool_call>` and JSON:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Parallel calls each have their own markers. Hermes 2 Pro may write `arguments` before `name`: such a call is held until
its name, and committed to at its closing brace. Otherwise a call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.json_calls import JsonCalls

HERMES = JsonCalls("hermes", triggers=("<tool_call>",), end="</tool_call>", space="\n")
