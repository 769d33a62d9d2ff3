"""gpt-oss: Harmony, where each message has a channel. The prompt ends with `<|start|>assistant`:

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}
    <|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

without the line breaks. `analysis` is reasoning; `final`, and `commentary` that is addressed to nothing, are text. The
recipient may stand before the channel. A call is committed to at the opening brace of its arguments; a message to
another recipient, an unknown tool, or with other content comes out as it was written.
"""

from __future__ import annotations

import re

from router.answer_formats.grammar import Lark, Mode, Section, Tools
from router.answer_formats.reader import Give, Markers, Reader, Steps
from router.answer_formats.shapes.tool_format import ToolFormat
from router.answer_formats.shapes.values import value

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = Markers(_START, _CHANNEL)
_BODY_ENDS = Markers(*_ENDS, _START)
_IN_HEADER = Markers(_MESSAGE, *_ENDS)
_MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(ToolFormat):
    name = "harmony"
    triggers = (_START, _CHANNEL)

    def content(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Reads the whole answer, reasoning too."""
        while (yield from reader.more()):
            if (yield from reader.attempt(self.calls(reader, tools, False))):
                continue
            give = reader.out.text
            header = yield from reader.attempt(_header(reader))
            if header and not _recipient(header):
                give = reader.out.reasoning if _channel(header) == "analysis" else give
                yield from _body(reader, give)
                continue
            if header:  # to another recipient
                give(header)
            elif not (yield from reader.until(_HEADS, give)):
                return
            else:
                give(reader.buffer[reader.position])
                reader.position += 1

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        header = yield from _header(reader)
        name = _recipient(header)
        if name not in tools or _channel(header) == "final":
            return False
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        reader.start_call(name)
        if (yield from value(reader, reader.out.arguments)):
            reader.out.end_call()
            yield from reader.mark(*_ENDS)
        return True

    def section(self, lark: Lark, tools: Tools) -> Section:
        call = lark.one_of(
            f"{lark.text(f'commentary to=functions.{name} <|constrain|>json{_MESSAGE}')} {lark.json(schema)}"
            for name, schema in tools.items()
        )
        return Section({_CHANNEL: call}, "")

    def grammar(self, lark: Lark, tools: Tools, mode: Mode, is_parallel: bool, thought: str) -> str:
        """Reasoning and preambles, and then one call, which ends the answer; or the final message."""
        channel = lark.text(_CHANNEL)
        free = lark.rule(
            f'{channel} ("analysis" | "commentary") {lark.text(_MESSAGE)} {lark.until("<|end|>")} '
            + lark.text(f"{_START}assistant")
        )
        last = [f"{channel} {self.section(lark, tools).heads[_CHANNEL]}"]
        if mode is Mode.AUTO:
            last.append(f"{lark.text(f'{_CHANNEL}final{_MESSAGE}')} TEXT")
        return lark.start(f"{free}* ({' | '.join(last)})")


def _header(reader: Reader) -> Steps[str]:
    """All until the body of a message; empty if no message begins here."""
    if not (yield from reader.ahead(reader.take(_START, _CHANNEL))):
        return ""
    pieces: list[str] = []
    size = 0
    while size <= _MAX_HEADER and (yield from reader.more()):
        if found := (yield from reader.take(_MESSAGE)):
            return "".join([*pieces, found])
        pieces.append(reader.buffer[reader.position])
        reader.position += 1
        size += 1
    return ""


def _body(reader: Reader, give: Give) -> Steps[None]:
    if (yield from reader.until(_BODY_ENDS, give)):
        yield from reader.take(*_ENDS)


def _recipient(header: str) -> str:
    found = _RECIPIENT.search(header)
    return found.group(1) if found else ""


def _channel(header: str) -> str:
    found = _NAMED_CHANNEL.search(header)
    return found.group(1) if found else ""


HARMONY = Harmony()
