"""Gemma 4 and FunctionGemma (Gemma 3 is prompted to write Python: see `llama.py`):

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>

Keys stand bare and strings between marks, without escapes. A call is committed to at the opening brace of its
arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from router.model_formats.grammar import (
    FreeValue,
    GrammarText,
    Lark,
    Schema,
    Section,
    Tools,
    length,
    parameters,
    separated,
)
from router.model_formats.reader import Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.typed import types_of
from router.model_formats.shapes.values import KEY_CHARS, Dialect, value
from tandem.errors import InputError

_NAME = re.compile(r"[\w.-]+")
_MAX_NAME = 256
_MAX_DEPTH = 32
_SCALARS = frozenset(["integer", "number", "boolean", "null"])


@dataclass(frozen=True)
class GemmaCalls(ToolFormat):
    """Args: `mark`: text on both sides of a string."""

    name: str
    begin: str
    end: str
    mark: str

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.begin,)

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        if not (yield from reader.take(self.begin)) or not (yield from reader.mark("call:")):
            return False
        name = yield from reader.run(_NAME, _MAX_NAME)
        if name not in tools or (yield from reader.peek()) != "{":
            return False
        reader.start_call(name)
        if (yield from value(reader, reader.out.arguments, Dialect(mark=self.mark))):
            reader.out.end_call()
            yield from reader.mark(self.end)
        return True

    def section(self, lark: Lark, tools: Tools) -> Section:
        call = lark.one_of(
            f"{lark.text(f'call:{name}')} {self._object(lark, schema, name, 0)} {lark.text(self.end)}"
            for name, schema in tools.items()
        )
        return Section({self.begin: call}, f"{lark.text(self.begin)} {call}")

    def _object(self, lark: Lark, schema: Schema, where: str, depth: int) -> str:
        pieces = [
            (f"{lark.text(key + ':')} {self._value(lark, each, f'{where}/{key}', depth + 1)}", must)
            for key, each, must in parameters(schema, KEY_CHARS, where)
        ]
        return lark.rule(f'"{{" {separated(lark, pieces, ",")} "}}"')

    def _value(self, lark: Lark, schema: Schema, where: str, depth: int) -> str:
        if isinstance(schema, GrammarText):
            return f"{lark.text(self.mark)} {lark.until(self.mark, schema.bare)}"
        if isinstance(schema, FreeValue):
            return self._any(lark)
        types = types_of({"properties": {"": schema}}, "")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and all(isinstance(each, str) for each in values):
            return lark.one_of(lark.text(self.mark + each + self.mark) for each in values)
        if types <= _SCALARS:
            return lark.json(schema)
        if types == {"string"} and not {"pattern", "format", "$ref"} & schema.keys():
            return f"{lark.text(self.mark)} {lark.until(self.mark, length(schema))}"
        items = schema.get("items")
        is_plain = depth < _MAX_DEPTH and not {"$ref", "minItems", "maxItems", "uniqueItems"} & schema.keys()
        if types == {"array"} and is_plain and isinstance(items, Mapping):
            each = self._value(lark, items, f"{where}/items", depth + 1)
            return lark.rule(f'"[" ({each} ("," {each})*)? "]"')
        if types == {"object"} and is_plain:
            return self._object(lark, schema, where, depth)
        raise InputError(
            f"tools: {where}: this model's calls are not JSON, and a strict schema of type string may only have enum, "
            f"const, minLength and maxLength, an array items, an object properties; got {json.dumps(schema)[:100]}",
            field="tools",
        )

    def _any(self, lark: Lark) -> str:
        """Any value: rules of their own, which refer to each other."""
        text = f"{lark.text(self.mark)} {lark.until(self.mark)}"
        scalar = lark.json({"type": ["number", "boolean", "null"]})
        return lark.recursive(
            lambda value: (
                f'{text} | {scalar} | "[" ({value} ("," {value})*)? "]"'
                f' | "{{" (/{KEY_CHARS.pattern}/ ":" {value} ("," /{KEY_CHARS.pattern}/ ":" {value})*)? "}}"'
            )
        )


GEMMA4 = GemmaCalls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
