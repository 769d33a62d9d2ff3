"""Calls as XML-like elements: the name, and each argument's key and bare value.

A call is committed to at its first key, or at its end if it has no arguments. An argument that may only be a string is
given out while it comes; others at their end, as JSON of the type in the tool's schema if they are that, else as a
string. An end mark inside a value is a part of the value unless what follows it can follow a value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

from router.model_formats.grammar import (
    FreeValue,
    GrammarText,
    Lark,
    Schema,
    Section,
    Tools,
    length,
    optional,
    parameters,
)
from router.model_formats.reader import Events, Markers, Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.typed import json_of, types_of
from tandem.errors import InputError

MAX_VALUE_CHARS = 256 << 10  # a longer value is given out as a string
_NAME = re.compile(r"[^\s<>\"]+")
_KEY = re.compile(r"[^<>\"]+")
_MAX_NAME = 256
_STRING_KEYWORDS = frozenset(["pattern", "format", "not", "if", "allOf", "anyOf", "oneOf"])  # of no use to bare text


@dataclass(frozen=True)
class XmlCalls(ToolFormat):
    """Args:
    wrapper: texts around the elements of calls. Either may be missing where it is read.
    call: text before the name.
    name_end: text after it; empty: white space or the next mark.
    key, key_ends: texts before and after a key, which bare or white space separates from the value.
    value_end, call_end: texts after a value and after a call.
    line: a line break that may stand on each side of a value. `is_line_written`: it does in the grammar.
    is_wrapper_shared: the grammar's parallel calls stand in one wrapper.
    """

    name: str
    call: str
    name_end: str
    key: str
    key_ends: tuple[str, ...]
    value_end: str
    call_end: str
    wrapper: tuple[str, str] | None = None
    line: str = ""
    is_line_written: bool = True
    is_wrapper_shared: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.wrapper[0], self.call) if self.wrapper else (self.call,)

    @cached_property
    def _value_end_texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.line + self.value_end, self.value_end]))

    @cached_property
    def _value_ends(self) -> Markers:
        return Markers(*self._value_end_texts)

    @cached_property
    def _call_ends(self) -> tuple[str, ...]:
        return (self.call_end, self.wrapper[1]) if self.wrapper else (self.call_end,)

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        if self.wrapper and (yield from reader.take(self.wrapper[0])):
            yield from reader.space()
        if not (yield from self._call(reader, tools)):
            return False
        while not reader.out.is_call_open and (yield from reader.attempt(self._call(reader, tools))):
            pass
        if self.wrapper and not reader.out.is_call_open:
            yield from reader.mark(self.wrapper[1])
        return True

    def _call(self, reader: Reader, tools: Tools) -> Steps[bool]:
        yield from reader.space()
        if not (yield from reader.take(self.call)):
            return False
        yield from reader.space()
        name = yield from reader.run(_NAME, _MAX_NAME)
        if name not in tools or (self.name_end and not (yield from reader.take(self.name_end))):
            return False
        key = yield from reader.attempt(self._key(reader))
        if not key and not (yield from reader.mark(self.call_end)):
            return False
        reader.start_call(name)
        before = "{"
        while key:
            reader.out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(reader, types_of(tools[name], key))):
                return True
            key = yield from reader.attempt(self._key(reader))
            if not key and not (yield from reader.mark(*self._call_ends)):
                return True
        reader.out.arguments("{}" if before == "{" else "}")
        reader.out.end_call()
        return True

    def _key(self, reader: Reader) -> Steps[str]:
        """Reads until the value; empty if there is no key."""
        yield from reader.space()
        if not (yield from reader.take(self.key)):
            return ""
        key = (yield from reader.run(_KEY, _MAX_NAME)).strip()
        for each in self.key_ends:
            if not (yield from reader.mark(each)):
                return ""
        if self.line:
            yield from reader.take(self.line)
        return key

    def _value(self, reader: Reader, types: frozenset[str]) -> Steps[bool]:
        """False: it was cut off."""
        value = _Value(reader.out, types)
        while (yield from reader.until(self._value_ends, value.give)):
            if (yield from reader.attempt(self._value_end(reader))):
                value.end()
                return True
            value.give(reader.buffer[reader.position])
            reader.position += 1
        value.cut_off()
        return False

    def _value_end(self, reader: Reader) -> Steps[bool]:
        yield from reader.take(*self._value_end_texts)
        return (yield from reader.ahead(self._can_follow_value(reader)))

    def _can_follow_value(self, reader: Reader) -> Steps[bool]:
        yield from reader.space()
        return bool((yield from reader.take(self.key, *self._call_ends))) or not (yield from reader.more())

    # The grammar

    def section(self, lark: Lark, tools: Tools) -> Section:
        call = lark.one_of(self._call_rule(lark, name, schema) for name, schema in tools.items())
        begin = lark.text("\n" + self.call)
        if not self.wrapper:
            return Section({self.call: call}, f"{begin} {call}")
        opening, closing = self.wrapper
        if self.is_wrapper_shared:
            heads = {opening: f"{begin} {call}", self.call: call}
            return Section(heads, f"{begin} {call}", lark.text("\n" + closing))
        whole = f"{begin} {call} {lark.text(chr(10) + closing)}"
        return Section({opening: whole, self.call: call}, f"{lark.text(chr(10) + opening)} {whole}")

    def _call_rule(self, lark: Lark, name: str, schema: Schema) -> str:
        pieces = []
        for key, each, is_required in parameters(schema, _KEY, name):
            line = self.line if self.is_line_written or isinstance(each, GrammarText) else ""
            head = lark.text("\n" + self.key + key + "\n".join(self.key_ends) + line)
            value = self._value_rule(lark, each, types_of(schema, key), line + self.value_end, where=f"{name}: {key}")
            pieces.append((f"{head} {value}", is_required))
        return f"{lark.text(name + self.name_end)} {optional(pieces)} {lark.text(chr(10) + self.call_end)}"

    def _value_rule(self, lark: Lark, schema: Schema, types: frozenset[str], end: str, where: str) -> str:
        if isinstance(schema, GrammarText):
            return lark.until(self.value_end, schema.bare, before=end.removesuffix(self.value_end))
        if isinstance(schema, FreeValue):
            return lark.until(self.value_end, before=end.removesuffix(self.value_end))
        if "string" not in types:
            return f"{lark.json(schema)} {lark.text(end)}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            written = [each if isinstance(each, str) else json.dumps(each) for each in values]
            for each, text in zip(values, written, strict=True):
                if json.loads(json_of(text, types)) != each:
                    raise InputError(
                        f"tools: {where}: the model writes this value as bare text, which reads {text[:40]!r} as "
                        "another type; give all values of enum one type",
                        field="tools",
                    )
            return f"({' | '.join(map(lark.text, written))}) {lark.text(end)}"
        if types != {"string"} or not _STRING_KEYWORDS.isdisjoint(schema) or "$ref" in schema:
            raise InputError(
                f"tools: {where}: the model writes this value as bare text, for which a strict schema may only have "
                "type string, enum, const, minLength and maxLength; leave other keywords out",
                field="tools",
            )
        return lark.until(self.value_end, length(schema), before=end.removesuffix(self.value_end))


class _Value:
    """Gives out one value, or holds it until its end if it may be anything but a string."""

    def __init__(self, out: Events, types: frozenset[str]) -> None:
        self._out = out
        self._types = types
        self._held: list[str] | None = []
        self._size = 0
        if types == {"string"}:
            self._give_as_string()

    def give(self, text: str) -> None:
        if self._held is None:
            self._out.arguments(_escaped(text))
            return
        self._held.append(text)
        self._size += len(text)
        if self._size > MAX_VALUE_CHARS:
            self._give_as_string()

    def end(self) -> None:
        self._out.arguments('"' if self._held is None else json_of("".join(self._held), self._types))

    def cut_off(self) -> None:
        self._out.text("".join(self._held or ()))

    def _give_as_string(self) -> None:
        self._out.arguments('"' + _escaped("".join(self._held or ())))
        self._held = None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
