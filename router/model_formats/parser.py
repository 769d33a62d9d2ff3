"""Finds reasoning, text and calls in an answer while it comes; and the grammar of answers whose calls are valid."""

from __future__ import annotations

from collections.abc import Mapping

from router.model_formats.events import Event
from router.model_formats.formats.harmony import HARMONY
from router.model_formats.grammar import Lark, Mode, Tools
from router.model_formats.reader import Reader, Steps
from router.model_formats.registry import Formats
from tandem.errors import InputError

_SAMPLE: Tools = {"tool": {"type": "object", "properties": {"text": {"type": "string"}}}}


class AnswerParser:
    """Time is linear in the text. It holds back what may be the beginning of a marker, a call until it is committed to
    (at most 16 Ki characters), and the value of one argument that is not a string (at most 256 Ki).

    Text that only looks like a call comes out as it was written; so does the rest of a call that breaks off after it
    was committed to, which then has no CallEnded.

    Args:
        tools: the JSON Schema of each tool's arguments, by name. Calls of others are text.
        is_reasoning_opened: the prompt ended within reasoning (`ReasoningFormat.is_opened_by`).
    """

    def __init__(self, formats: Formats, tools: Tools, *, is_reasoning_opened: bool = False) -> None:
        self._reader = Reader()
        self._steps = _answer(self._reader, formats, tools, is_reasoning_opened)

    def feed(self, text: str) -> list[Event]:
        self._reader.add(text)
        return self._found()

    def finish(self) -> list[Event]:
        """The answer is at its end. `feed` must not be called any more."""
        self._reader.is_ended = True
        return self._found()

    def _found(self) -> list[Event]:
        next(self._steps, None)
        return self._reader.out.take()


def grammar(
    formats: Formats,
    tools: Tools,
    mode: Mode,
    *,
    is_parallel: bool = True,
    is_reasoning_opened: bool = False,
    special: Mapping[str, int] | None = None,
    answer: str = "",
) -> str:
    """A Lark grammar for llguidance of answers whose calls are valid. Reasoning before them is free.

    Args:
        tools: as the parser's; for one that is not strict, the schema `{"type": "object"}`. Empty: no calls, with an
            `answer` only.
        is_reasoning_opened: the answer begins with the rest of its reasoning.
        special: number of each special token of the vocabulary, by its text.
        answer: a Lark expression for the text instead of calls. Mode.REQUIRED allows none.

    Raises:
        InputError: the model has no known format, or the format cannot write what a schema asks for.
    """
    if not tools and not answer:
        raise InputError("tools: expected at least one", field="tools")
    lark = Lark(special)
    before = formats.reasoning.grammar(lark, is_reasoning_opened) if formats.reasoning else ""
    if formats.tools is not None and (tools or formats.tools is HARMONY):
        return formats.tools.grammar(lark, tools, mode, is_parallel, before, "" if mode is Mode.REQUIRED else answer)
    if tools:
        raise InputError("tools: this model's chat template has no known format of calls", field="tools")
    return lark.start(f"{before} {answer}".strip())


def kept_tokens(formats: Formats, special: Mapping[str, int]) -> frozenset[int]:
    """Special tokens that the formats write: the answer is not read without their texts."""
    lark = Lark(special)
    texts: list[str] = []
    if formats.tools is not None:
        formats.tools.grammar(lark, _SAMPLE, Mode.AUTO, is_parallel=True)
        texts += [*formats.tools.triggers, *formats.tools.other_marks]
    if formats.reasoning is not None:
        texts += [formats.reasoning.begin, formats.reasoning.end]
    for text in texts:
        lark.text(text)
    return frozenset(lark.used)


def _answer(reader: Reader, formats: Formats, tools: Tools, is_reasoning_opened: bool) -> Steps[None]:
    if formats.reasoning and formats.tools is not HARMONY:
        yield from formats.reasoning.read(reader, is_reasoning_opened)
    if formats.tools:
        yield from formats.tools.content(reader, tools)
    while (yield from reader.more()):
        reader.out.text(reader.buffer[reader.position :])
        reader.position = len(reader.buffer)
