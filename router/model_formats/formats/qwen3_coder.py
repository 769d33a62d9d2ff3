"""Qwen3-Coder, Qwen3-Next-Coder and Qwen 3.5:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The model sometimes leaves the outer tags out. A call is committed to at its first `<parameter=` with a key, or at
`</function>`. One line break on each side of a value is not a part of it.
"""

from __future__ import annotations

from router.model_formats.shapes.xml_calls import XmlCalls

QWEN3_CODER = XmlCalls(
    "qwen3_coder",
    wrapper=("<tool_call>", "</tool_call>"),
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_ends=(">",),
    value_end="</parameter>",
    call_end="</function>",
    line="\n",
)
