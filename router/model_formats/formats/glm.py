"""GLM 4.5, 4.6, 4.7 and 5:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Since 4.7 there are no line breaks between the tags. A call is committed to at its first `<arg_key>` with a key and the
`<arg_value>` after it, or at `</tool_call>`.
"""

from __future__ import annotations

from router.model_formats.shapes.xml_calls import XmlCalls

GLM = XmlCalls(
    "glm",
    call="<tool_call>",
    name_end="",
    key="<arg_key>",
    key_ends=("</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
    call_end="</tool_call>",
)
