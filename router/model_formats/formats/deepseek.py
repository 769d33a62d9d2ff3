"""DeepSeek V3 and R1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

DeepSeek V3.1, without the line break:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

A call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.named_calls import NamedCalls

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"

DEEPSEEK_V3 = NamedCalls(
    "deepseek_v3",
    section_marks=_SECTION,
    begin=_BEGIN,
    prefix=f"function{_SEPARATOR}",
    arguments=("```json",),
    ends=("```", _END),
    gap="\n",
    before="\n",
    after="\n",
)
DEEPSEEK_V31 = NamedCalls("deepseek_v31", section_marks=_SECTION, begin=_BEGIN, arguments=(_SEPARATOR,), ends=(_END,))
