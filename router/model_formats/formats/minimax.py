"""MiniMax M2:

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

Parallel calls are further `<invoke>` elements. A call is committed to at its first `<parameter name=` with a key, or at
`</invoke>`. One line break on each side of a value is not a part of it.
"""

from __future__ import annotations

from router.model_formats.shapes.xml_calls import XmlCalls

MINIMAX_M2 = XmlCalls(
    "minimax_m2",
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    call='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_ends=('">',),
    value_end="</parameter>",
    call_end="</invoke>",
    line="\n",
    is_line_written=False,
    is_wrapper_shared=True,
)
