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
from dataclasses import dataclass

from router.model_formats.grammar import Lark, Mode, Section, Tools
from router.model_formats.reader import Give, Markers, Reader, Steps
from router.model_formats.shapes.tool_format import ToolFormat
from router.model_formats.shapes.values import value

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = Markers(_START, _CHANNEL)
_BODY_ENDS = Markers(*_ENDS, _START)
_MAX_HEADER = 512  # characters
_TO = r"(?: to=(?:functions\.)?([^\s<]+))?"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant{_TO})?(?:<\|channel\|>(analysis|commentary|final){_TO})? ?"
    r"(?:<\|constrain\|>)?(?:json|code|text)? ?<\|message\|>"
)


@dataclass(frozen=True, slots=True)
class _Header:
    text: str
    channel: str
    recipient: str


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
            if header and not header.recipient:
                give = reader.out.reasoning if header.channel == "analysis" else give
                yield from _body(reader, give)
                continue
            if header:  # to another recipient
                give(header.text)
            elif not (yield from reader.until(_HEADS, give)):
                return
            else:
                give(reader.buffer[reader.position])
                reader.position += 1

    def calls(self, reader: Reader, tools: Tools, is_first: bool) -> Steps[bool]:
        header = yield from _header(reader)
        if not header or header.recipient not in tools or header.channel == "final":
            return False
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        reader.start_call(header.recipient)
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

    def grammar(
        self, lark: Lark, tools: Tools, mode: Mode, is_parallel: bool, before: str = "", answer: str = ""
    ) -> str:
        """Reasoning and preambles, and then one call, which ends the answer; or the final message. `before` is not
        used: the format has its own reasoning."""
        channel = lark.text(_CHANNEL)
        free = lark.rule(
            f'{channel} ("analysis" | "commentary") {lark.text(_MESSAGE)} {lark.until("<|end|>")} '
            + lark.text(f"{_START}assistant")
        )
        last = [f"{channel} {self.section(lark, tools).heads[_CHANNEL]}"] if tools else []
        if mode is Mode.AUTO:
            last.append(f"{lark.text(f'{_CHANNEL}final{_MESSAGE}')} {answer or 'TEXT'}")
        return lark.start(f"{free}* ({' | '.join(last)})")


def _header(reader: Reader) -> Steps[_Header | None]:
    """All until the body of a message."""
    if not (yield from reader.ahead(reader.take(_START, _CHANNEL))):
        return None
    chars: list[str] = []
    while not (yield from reader.take(_MESSAGE)):
        if len(chars) == _MAX_HEADER or not (yield from reader.more()):
            return None
        chars.append(reader.buffer[reader.position])
        reader.position += 1
    text = "".join([*chars, _MESSAGE])
    found = _HEADER.fullmatch(text)
    return _Header(text, found[2] or "", found[1] or found[3] or "") if found else None


def _body(reader: Reader, give: Give) -> Steps[None]:
    if (yield from reader.until(_BODY_ENDS, give)):
        yield from reader.take(*_ENDS)


HARMONY = Harmony()
