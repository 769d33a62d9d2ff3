"""The text of an answer as it comes, read by generators that pause where more text is needed.

What a generator finds depends on the text alone, not on how it was cut into pieces. An attempt that finds no call goes
back to where it began: until then its text is held. Each attempt reads at most MAX_HELD_CHARS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from router.model_formats.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, Text

MAX_HELD_CHARS = 16 << 10  # of what may turn out to be no call
MAX_SPACE = 64  # white space that is dropped at once

T = TypeVar("T")
Steps = Generator[None, None, T]  # pauses where it needs more text
Give = Callable[[str], None]
_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Texts to look for. None of them may stand inside another, except at its end."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._begins = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=1) - 1
        self._first = re.compile("|".join({re.escape(text[0]) for text in texts}) or r"(?!)")

    def begun(self, buffer: str, start: int) -> int:
        """The number of characters at the end of `buffer`, from `start`, that may be the beginning of a marker."""
        for found in self._first.finditer(buffer, max(start, len(buffer) - self._longest)):
            if buffer[found.start() :] in self._begins:
                return len(buffer) - found.start()
        return 0


class Events:
    """The events of one answer. Adjacent pieces of one kind are joined."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._kind: Callable[[str], Event] | None = None
        self._calls = 0
        self.is_call_open = False  # started, and not ended

    def text(self, text: str) -> None:
        self._add(Text, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def arguments(self, text: str) -> None:
        self._add(self._arguments, text)

    def start_call(self, name: str, id: str | None) -> None:
        self._join()
        self._events.append(CallStarted(self._calls, name, id))
        self._calls += 1
        self.is_call_open = True

    def end_call(self) -> None:
        self._join()
        self._events.append(CallEnded(self._calls - 1))
        self.is_call_open = False

    def take(self) -> list[Event]:
        self._join()
        events, self._events = self._events, []
        return events

    def _arguments(self, text: str) -> Event:
        return CallArguments(self._calls - 1, text)

    def _add(self, kind: Callable[[str], Event], text: str) -> None:
        if kind != self._kind:
            self._join()
            self._kind = kind
        self._pieces.append(text)

    def _join(self) -> None:
        if self._kind is not None and (text := "".join(self._pieces)):
            self._events.append(self._kind(text))
        self._pieces.clear()
        self._kind = None


class Reader:
    """`buffer[position:]` came and has not been read."""

    def __init__(self) -> None:
        self.out = Events()
        self.buffer = ""
        self.position = 0
        self.is_ended = False
        self._base = 0  # of the answer, where the buffer begins
        self._marks: list[int] = []  # of the answer, where attempts began

    def add(self, text: str) -> None:
        keep = self._marks[0] - self._base if self._marks else self.position
        self.buffer = self.buffer[keep:] + text
        self.position -= keep
        self._base += keep

    # Reading

    def more(self) -> Steps[bool]:
        """Whether there is a further character."""
        while self.position == len(self.buffer):
            if self.is_ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        return self.buffer[self.position] if (yield from self.more()) else ""

    def take(self, *texts: str) -> Steps[str]:
        """Reads the one of `texts` that comes next; empty if none does. None of them may begin another."""
        while texts:
            for text in texts:
                if self.buffer.startswith(text, self.position):
                    self.position += len(text)
                    return text
            rest = self.buffer[self.position :] if len(self.buffer) - self.position < max(map(len, texts)) else None
            if rest is None or self.is_ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield
        return ""

    def space(self) -> Steps[str]:
        """Reads white space, at most MAX_SPACE."""
        if self.position < len(self.buffer) and self.buffer[self.position] not in " \t\r\n":
            return ""
        read: list[str] = []
        left = MAX_SPACE
        while left and (yield from self.more()):
            found = _SPACE.match(self.buffer, self.position, self.position + left)
            if not found or not found.group():
                break
            self.position = found.end()
            left -= len(found.group())
            read.append(found.group())
        return "".join(read)

    def mark(self, *texts: str) -> Steps[str]:
        """As `take`, after white space. Reads nothing if none of `texts` comes."""
        return (yield from self.attempt(self._mark(*texts)))

    def _mark(self, *texts: str) -> Steps[str]:
        yield from self.space()
        return (yield from self.take(*texts))

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Reads the characters that `pattern` (a class with a `+`) matches. Empty if there are more than `limit`."""
        read: list[str] = []
        while (yield from self.more()):
            found = pattern.match(self.buffer, self.position, self.position + limit + 1)
            if not found:
                break
            self.position = found.end()
            limit -= len(found.group())
            if limit < 0:
                return ""
            read.append(found.group())
        return "".join(read)

    def until(self, markers: Markers, give: Give) -> Steps[bool]:
        """Gives the text before the first marker and stops at the marker. False: the text ended without one."""
        while True:
            found = markers.pattern.search(self.buffer, self.position)
            if found:
                end = found.start()
            else:
                held = 0 if self.is_ended else markers.begun(self.buffer, self.position)
                end = len(self.buffer) - held
            if end > self.position:
                give(self.buffer[self.position : end])
                self.position = end
            if found or self.is_ended:
                return found is not None
            yield

    # Attempts

    def attempt(self, steps: Steps[T]) -> Steps[T]:
        """Goes back to where it began if `steps` return nothing true."""
        depth, mark = len(self._marks), self._base + self.position
        self._marks.append(mark)
        found = yield from steps
        if not found:
            self.position = mark - self._base
        del self._marks[depth:]
        return found

    def ahead(self, steps: Steps[T]) -> Steps[T]:
        """Runs `steps` and goes back to where they began."""
        depth, mark = len(self._marks), self._base + self.position
        self._marks.append(mark)
        found = yield from steps
        self.position = mark - self._base
        del self._marks[depth:]
        return found

    @property
    def is_too_long(self) -> bool:
        """Whether the attempt under way has read more than it may."""
        return bool(self._marks) and self._base + self.position - self._marks[0] > MAX_HELD_CHARS

    def start_call(self, name: str, id: str | None = None) -> None:
        """There is no way back from here."""
        self._marks.clear()
        self.out.start_call(name, id)
