"""What every format of calls has, and how an answer's content is read with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from router.model_formats.grammar import Lark, Mode, Section, Tools
from router.model_formats.reader import Markers, Reader, Steps


class ToolFormat(ABC):
    """Args: `triggers`: the markers that calls may begin with. `other_marks`: those that may follow, but that the
    grammar need not write. `is_bare`: calls may begin an answer without a trigger."""

    name: str
    triggers: tuple[str, ...]
    other_marks: tuple[str, ...] = ()
    is_bare: bool = False

    @cached_property
    def markers(self) -> Markers:
        return Markers(*self.triggers)

    @abstractmethod
    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        """Reads calls from their trigger on. False: there is none, and nothing was given out. `is_first`: nothing but
        reasoning and white space stands before."""

    @abstractmethod
    def section(self, lark: Lark, tools: Tools) -> Section:
        """Raises InputError if the format cannot write what a schema asks for."""

    def grammar(
        self, lark: Lark, tools: Tools, mode: Mode, is_parallel: bool, before: str = "", answer: str = ""
    ) -> str:
        """Args:
        before: an expression for the reasoning with which the answer may begin; empty: for none.
        answer: an expression for the text instead of calls, with Mode.AUTO; empty: any text, also before calls.
        """
        return lark.whole(self.section(lark, tools), mode, is_parallel, before, answer)

    def content(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Reads text and calls until the end. White space between calls, before the first if there is no text, and
        after the last if nothing follows, is dropped."""
        is_first = True
        while (yield from reader.more()):
            found = yield from reader.attempt(self._calls_at_border(reader, tools, is_first))
            is_first = False
            while not found:
                if not (yield from reader.until(self.markers, reader.out.text)):
                    return
                found = yield from reader.attempt(self.calls(reader, tools, False))
                if not found:
                    reader.out.text(reader.buffer[reader.position])
                    reader.position += 1

    def _calls_at_border(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        yield from reader.space()
        if not (yield from reader.more()):
            return not is_first
        return (yield from self.calls(reader, tools, is_first))


class Either(ToolFormat):
    """Calls in any of some formats. Its grammar is that of the first."""

    def __init__(self, name: str, *formats: ToolFormat) -> None:
        self.name = name
        self._formats = formats
        self.triggers = tuple(dict.fromkeys(trigger for each in formats for trigger in each.triggers))
        self.other_marks = tuple(mark for each in formats for mark in each.other_marks)
        self.is_bare = any(each.is_bare for each in formats)

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        for each in self._formats:
            if (yield from reader.attempt(each.calls(reader, tools, is_first))):
                return True
        return False

    def section(self, lark: Lark, tools: Tools) -> Section:
        return self._formats[0].section(lark, tools)
