"""Calls as JSON objects that hold the name and the arguments, after a marker, one by one or in a list.

A call is committed to at the opening brace of its arguments if the name stands before them, and at the object's end
otherwise. Beside them it may only have an id and a type, of which the id is kept if it stands before the arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from router.model_formats.grammar import Lark, Section, Tools
from router.model_formats.reader import Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.values import text_of_string, value

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")
_MAX_KEY = 64


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """Args:
    triggers: the first one is that of the grammar. One may end with the `[` of the list.
    end: the marker that ends the calls. It may be missing where it is read. `read_ends`: others that are read.
    separator: between calls after one marker. Empty: each has its own marker.
    is_list: the grammar's calls stand in a list. Both are read.
    space: white space inside the markers, in the grammar.
    arguments_key: the grammar's. `arguments` and `parameters` are read.
    """

    name: str
    triggers: tuple[str, ...]
    end: str = ""
    read_ends: tuple[str, ...] = ()
    separator: str = ""
    is_list: bool = False
    is_bare: bool = False
    space: str = ""
    arguments_key: str = "arguments"

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        found = (yield from reader.take(*self.triggers)) if self.triggers else ""
        if not found and not (self.is_bare and is_first):
            return False
        yield from reader.space()
        is_list = found.endswith("[") or bool((yield from reader.take("[")))
        separator = "," if is_list else self.separator
        if is_list:
            yield from reader.space()
        if not (yield from call_object(reader, tools)):
            return False
        while not reader.out.is_call_open and separator:
            if not (yield from reader.attempt(_next(reader, tools, separator))):
                break
        if not reader.out.is_call_open and (not is_list or (yield from reader.mark("]"))):
            yield from reader.mark(*filter(None, (self.end, *self.read_ends)))
        return True

    def section(self, lark: Lark, tools: Tools) -> Section:
        opening, closing = ("[", "]") if self.is_list else ("", "")
        call = lark.one_of(
            lark.text(f'{{"name": {json.dumps(name)}, "{self.arguments_key}": ')
            + f" {lark.json(schema)} "
            + lark.text("}")
            for name, schema in tools.items()
        )
        end = lark.text(closing + self.space + self.end)
        triggers = (*(("",) if self.is_bare else ()), *self.triggers)
        if separator := "," if self.is_list else self.separator:
            return Section(
                {each: f"{lark.text(opening.removeprefix(each[-1:]))} {call}" for each in triggers},
                f"{lark.text(separator + ' ')} {call}",
                end,
                bare="{[" if self.is_bare else "",
            )
        one = f"{lark.text(self.space)} {call} {end}"
        return Section({trigger: one for trigger in triggers}, f"{lark.text(chr(10) + self.triggers[0])} {one}")


def call_object(reader: Reader, tools: Tools) -> Steps[bool]:
    if not (yield from reader.take("{")):
        return False
    name = call_id = arguments = None
    separator = ""
    while not reader.is_too_long:
        yield from reader.space()
        if (yield from reader.take("}")):
            if name is None:
                return False
            reader.start_call(name, call_id)
            reader.out.arguments(arguments or "{}")
            reader.out.end_call()
            return True
        if separator and not (yield from reader.take(separator)):
            return False
        separator = ","
        key = yield from _key(reader)
        if key == "name" and name is None:
            name = yield from text_of_string(reader, max(map(len, tools), default=0))
            if name not in tools:
                return False
        elif key in _ARGUMENTS and (yield from reader.peek()) != "{":
            return False
        elif key in _ARGUMENTS and name is not None:
            reader.start_call(name, call_id)
            if (yield from value(reader, reader.out.arguments)):
                reader.out.end_call()
                yield from reader.attempt(_rest(reader))
            return True
        else:
            pieces: list[str] = []
            if key not in (*_ARGUMENTS, *_OTHERS) or not (yield from value(reader, pieces.append)):
                return False
            text = "".join(pieces)
            if key in _ARGUMENTS:
                arguments = text
            elif key == "id" and text[0] == '"':
                call_id = json.loads(text)
    return False


def _key(reader: Reader) -> Steps[str | None]:
    yield from reader.space()
    key = yield from text_of_string(reader, _MAX_KEY)
    yield from reader.space()
    if key is None or not (yield from reader.take(":")):
        return None
    yield from reader.space()
    return key


def _rest(reader: Reader) -> Steps[bool]:
    """The object after its arguments."""
    while not reader.is_too_long:
        yield from reader.space()
        if (found := (yield from reader.take(",", "}"))) != ",":
            return bool(found)
        if (yield from _key(reader)) not in _OTHERS or not (yield from value(reader, lambda _: None)):
            return False
    return False


def _next(reader: Reader, tools: Tools, separator: str) -> Steps[bool]:
    yield from reader.space()
    if not (yield from reader.take(separator)):
        return False
    yield from reader.space()
    return (yield from call_object(reader, tools))
