"""Mistral. Until the tokenizer v7 (Mistral 7B v0.3, Nemo, Large 2, Small 3), with the id after the arguments, where it
is read over:

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]

Since v11 (Small 3.1 and later, Magistral, Devstral), where `[CALL_ID]` and `[ARGS]` may be missing:

    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

Both names read both. A call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

from router.model_formats.shapes.json_calls import JsonCalls
from router.model_formats.shapes.named_calls import NamedCalls
from router.model_formats.shapes.tool_format import Either

_LIST = JsonCalls("mistral", triggers=("[TOOL_CALLS]",), is_list=True)
_NAMED = NamedCalls("mistral_args", begin="[TOOL_CALLS]", arguments=("[ARGS]",), must_mark=False, id_mark="[CALL_ID]")
MISTRAL = Either("mistral", _LIST, _NAMED)
MISTRAL_ARGS = Either("mistral_args", _NAMED, _LIST)
