"""Calls as a list of Python calls with keyword arguments: `[name(key="text", other=[1, True]), name()]`.

A call is committed to at its first `key=`, or at its `)`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from router.model_formats.grammar import Lark, Section, Tools, parameters, separated
from router.model_formats.reader import Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.values import PYTHON, value

_NAME = re.compile(r"[\w.-]+")
_MAX_NAME = 256


@dataclass(frozen=True)
class PythonicCalls(ToolFormat):
    """Args: `end`: the marker that ends the calls; it may be missing where it is read."""

    name: str
    triggers: tuple[str, ...] = ()
    end: str = ""
    is_bare: bool = True

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        found = (yield from reader.take(*self.triggers)) if self.triggers else ""
        if not found and not is_first:
            return False
        if not (yield from reader.mark("[")) or not (yield from self._call(reader, tools)):
            return False
        while not reader.out.is_call_open and (yield from reader.attempt(self._next(reader, tools))):
            pass
        if not reader.out.is_call_open and (yield from reader.mark("]")) and self.end:
            yield from reader.mark(self.end)
        return True

    def section(self, lark: Lark, tools: Tools) -> Section:
        calls = []
        for name, schema in tools.items():
            pieces = [
                (f"{lark.text(key + '=')} {lark.json(each)}", must)
                for key, each, must in parameters(schema, _NAME, name)
            ]
            calls.append(f"{lark.text(name + '(')} {separated(lark, pieces, ', ')} {lark.text(')')}")
        call = lark.one_of(calls)
        end = lark.text("]" + self.end)
        return Section({each: f'"[" {call}' for each in ("", *self.triggers)}, f'", " {call}', end, bare="[")

    def _next(self, reader: Reader, tools: Tools) -> Steps[bool]:
        return bool((yield from reader.mark(","))) and (yield from self._call(reader, tools))

    def _call(self, reader: Reader, tools: Tools) -> Steps[bool]:
        yield from reader.space()
        name = yield from reader.run(_NAME, _MAX_NAME)
        if name not in tools or not (yield from reader.take("(")):
            return False
        key = yield from reader.attempt(_key(reader))
        if not key and not (yield from reader.mark(")")):
            return False
        reader.start_call(name)
        before = "{"
        while key:
            reader.out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from value(reader, reader.out.arguments, PYTHON)):
                return True
            key = yield from reader.attempt(_key(reader, ","))
            if not key and not (yield from reader.mark(")")):
                return True
        reader.out.arguments("{}" if before == "{" else "}")
        reader.out.end_call()
        return True


def _key(reader: Reader, separator: str = "") -> Steps[str]:
    """Reads `key=`; empty if there is none."""
    if separator and not (yield from reader.mark(separator)):
        return ""
    yield from reader.space()
    key = yield from reader.run(_NAME, _MAX_NAME)
    if not key or not (yield from reader.mark("=")):
        return ""
    yield from reader.space()
    return key
