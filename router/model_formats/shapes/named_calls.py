"""Calls as a name and then the arguments as JSON, each after a marker.

A call is committed to at the opening brace of its arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.model_formats.grammar import Lark, Section, Tools
from router.model_formats.reader import Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.values import value

_NAME = re.compile(r"[^\s<>\[\]{}()\"'`｜|]+")
_MAX_NAME = 256


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """Args:
    begin: a call's marker. `section`: the markers around all calls; either may be missing where it is read.
    prefix: text before the name.
    arguments: texts between the name and the arguments, with white space between them. `must_mark`: they must be there.
    id_mark: text before an id that may follow the name.
    ends: texts after the arguments; each may be missing where it is read.
    gap: between calls, in the grammar. `before` and `after` the arguments too.
    is_numbered: the name is `functions.NAME:NUMBER`, which is the call's id.
    """

    name: str
    begin: str
    section_marks: tuple[str, str] | None = None
    prefix: str = ""
    arguments: tuple[str, ...] = ()
    must_mark: bool = True
    id_mark: str = ""
    ends: tuple[str, ...] = ()
    gap: str = ""
    before: str = ""
    after: str = ""
    is_numbered: bool = False

    @property
    def other_marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.id_mark, *self.arguments, *self.ends, *(self.section_marks or ()))

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.section_marks[0], self.begin) if self.section_marks else (self.begin,)

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        if self.section_marks and (yield from reader.take(self.section_marks[0])):
            yield from reader.space()
        if not (yield from self._call(reader, tools)):
            return False
        while not reader.out.is_call_open and (yield from reader.attempt(self._call(reader, tools))):
            pass
        if not reader.out.is_call_open and self.section_marks:
            yield from reader.mark(self.section_marks[1])
        return True

    def section(self, lark: Lark, tools: Tools) -> Section:
        call = lark.one_of(
            self._rule(lark, name) + f" {lark.json(schema)} {self._end(lark)}" for name, schema in tools.items()
        )
        more = f"{lark.text(self.gap + self.begin)} {call}"
        if not self.section_marks:
            return Section({self.begin: call}, more)
        heads = {self.section_marks[0]: f"{lark.text(self.begin)} {call}", self.begin: call}
        return Section(heads, more, lark.text(self.section_marks[1]))

    def _rule(self, lark: Lark, name: str) -> str:
        named = lark.text(self.prefix + name)
        if self.is_numbered:
            named += ' ":" /[0-9]{1,3}/'
        return f"{named} {lark.text(self.before.join(('', *self.arguments, '')))}" if self.arguments else named

    def _end(self, lark: Lark) -> str:
        return lark.text(self.after + "".join(self.ends)) if self.ends else ""

    def _call(self, reader: Reader, tools: Tools) -> Steps[bool]:
        yield from reader.space()
        if not (yield from reader.take(self.begin)):
            return False
        yield from reader.space()
        if self.prefix and not (yield from reader.take(self.prefix)) and not self.is_numbered:
            return False
        written = yield from reader.run(_NAME, _MAX_NAME)
        name, colon, number = written.rpartition(":") if self.is_numbered else (written, "", "")
        call_id = self.prefix + written if colon and number.isdecimal() else None
        if not colon:
            name = written
        if name not in tools:
            return False
        if self.id_mark and (yield from reader.take(self.id_mark)):
            call_id = yield from reader.run(_NAME, _MAX_NAME)
        for mark in self.arguments:
            if not (yield from reader.mark(mark)) and self.must_mark:
                return False
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        reader.start_call(name, call_id)
        if (yield from value(reader, reader.out.arguments)):
            reader.out.end_call()
            for mark in self.ends:
                yield from reader.mark(mark)
        return True
