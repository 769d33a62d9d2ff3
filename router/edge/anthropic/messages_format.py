"""Format of the Messages API: one object, or its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from pydantic_core import from_json

from router.edge.anthropic.answer_schema import (
    AnswerBlock,
    BlockDelta,
    BlockDeltaEvent,
    BlockStartEvent,
    BlockStopEvent,
    InputJsonDelta,
    MessageDeltaEvent,
    MessageEvent,
    MessageObject,
    MessageStartEvent,
    MessageStopEvent,
    MessageStopReason,
    MessagesUsage,
    PingEvent,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from router.edge.anthropic.messages_errors import messages_error
from router.edge.anthropic.messages_schema import MessagesRequest
from router.edge.json_slices import json_pieces
from router.edge.openai.answer_format import TextEventTemplate, text_of
from router.model_formats.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, Text
from router.requests.answers import Answers, Arrival, WholeAnswer
from router.requests.output import Usage
from tandem.errors import TandemError
from tandem.request import FinishReason


@dataclass
class _Block:
    """`start`: as it begins. `delta`: makes the event of a further text."""

    start: AnswerBlock
    delta: Callable[[str], bytes]
    texts: list[str] = field(default_factory=list)
    is_whole: bool = False  # its call has ended


class MessagesFormat:
    """One answer: its text, or what its parts are if it may have reasoning or calls. White space alone is no block
    beside calls."""

    def __init__(self, answers: Answers, request: MessagesRequest) -> None:
        self._answers = answers
        self._request = request
        self._id = f"msg_{answers.request_id}"
        self._reader = answers.reader()
        self._only = answers.submitted[0]
        self._blocks: list[_Block] = []
        self._is_open = False  # the last one
        self._white = ""  # may begin a block of text
        self._reason: FinishReason | None = None

    def begin(self) -> Iterator[bytes]:
        prompt_tokens = self._only.request.prompt_tokens
        message = self._message([], _usage(Usage(prompt_tokens, 0, 0)))
        yield _sent(MessageStartEvent(message=message))
        yield _sent(PingEvent())

    def events(self, arrivals: Sequence[Arrival]) -> Iterator[bytes]:
        for arrival in arrivals:
            yield from self._take(self._reader.feed(text_of(arrival.pieces)))
            if arrival.final is not None:
                self._reason = arrival.final.reason
                yield from self._rest()

    def end(self) -> Iterator[bytes]:
        delta = StopDelta(self._stop_reason(), self._only.stream.stop_string)
        yield _sent(MessageDeltaEvent(delta=delta, usage=_usage(self._answers.usage())))
        yield _sent(MessageStopEvent())

    def failed(self, error: TandemError) -> Iterator[bytes]:
        yield _sent(messages_error(error.wire.http_status, error.message, self._answers.request_id))

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterator[bytes]:
        (whole,) = wholes
        self._reason = whole.reason
        for _ in (*self._take(self._reader.feed(whole.text)), *self._rest()):
            pass  # the events are a stream's
        message = self._message([_made(each) for each in self._blocks], _usage(self._answers.usage()))
        message.stop_reason, message.stop_sequence = self._stop_reason(), self._only.stream.stop_string
        return json_pieces(message)

    def _rest(self) -> Iterator[bytes]:
        yield from self._take(self._reader.finish())
        if self._white and not any(isinstance(each.start, ToolUseBlock) for each in self._blocks):
            yield from self._add(TextBlock, self._white)
        yield from self._closed()

    def _take(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            match event:
                case Text():
                    yield from self._text(event.text)
                case Reasoning():
                    yield from self._add(ThinkingBlock, event.text)
                case CallStarted():
                    self._white = ""
                    block = ToolUseBlock(id=self._reader.call_id(event), name=event.name, input={})
                    yield from self._opened(block)
                case CallArguments():
                    yield from self._further(event.text)
                case CallEnded():
                    self._blocks[-1].is_whole = True
                    yield from self._closed()

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._is_in(TextBlock):
            text, self._white = self._white + text, ""
            if text.isspace():
                self._white = text
                return
        yield from self._add(TextBlock, text)

    def _add(self, kind: type[TextBlock | ThinkingBlock], text: str) -> Iterator[bytes]:
        if not self._is_in(kind):
            empty = TextBlock(text="") if kind is TextBlock else ThinkingBlock(thinking="", signature="")
            yield from self._opened(empty)
        if kind is TextBlock or self._request.shows_thinking:
            yield from self._further(text)

    def _is_in(self, kind: type[AnswerBlock]) -> bool:
        return self._is_open and isinstance(self._blocks[-1].start, kind)

    def _opened(self, start: AnswerBlock) -> Iterator[bytes]:
        yield from self._closed()
        index = len(self._blocks)
        template = TextEventTemplate(lambda text: _sent(BlockDeltaEvent(index=index, delta=_delta(start, text))))
        self._blocks.append(_Block(start, template.fill))
        self._is_open = True
        yield _sent(BlockStartEvent(index=index, content_block=start))

    def _further(self, text: str) -> Iterator[bytes]:
        block = self._blocks[-1]
        block.texts.append(text)
        yield block.delta(text)

    def _closed(self) -> Iterator[bytes]:
        """Closes the last block, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        index, start = len(self._blocks) - 1, self._blocks[-1].start
        if isinstance(start, ThinkingBlock):
            start.signature = f"{self._id}_{index}"
            yield _sent(BlockDeltaEvent(index=index, delta=SignatureDelta(signature=start.signature)))
        yield _sent(BlockStopEvent(index=index))

    def _stop_reason(self) -> MessageStopReason:
        if self._reason is FinishReason.LENGTH:
            limit = self._only.request.sampling.max_tokens
            return "max_tokens" if self._request.max_tokens <= limit else "model_context_window_exceeded"
        if self._only.stream.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(each.is_whole for each in self._blocks) else "end_turn"

    def _message(self, content: list[AnswerBlock], usage: MessagesUsage) -> MessageObject:
        return MessageObject(id=self._id, model=self._answers.model.name, content=content, usage=usage)


def _sent(event: MessageEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _delta(start: AnswerBlock, text: str) -> BlockDelta:
    match start:
        case TextBlock():
            return TextDelta(text=text)
        case ThinkingBlock():
            return ThinkingDelta(thinking=text)
        case ToolUseBlock():
            return InputJsonDelta(partial_json=text)


def _made(block: _Block) -> AnswerBlock:
    start, text = block.start, "".join(block.texts)
    match start:
        case TextBlock():
            return TextBlock(text=text)
        case ThinkingBlock():
            return ThinkingBlock(thinking=text, signature=start.signature)
        case ToolUseBlock():
            return ToolUseBlock(id=start.id, name=start.name, input=_input(text, is_whole=block.is_whole))


def _input(text: str, *, is_whole: bool) -> dict[str, Any]:
    """As the model wrote it; of a call that was cut off, what is there. It is only encoded."""
    if not is_whole:
        try:
            found = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
        except ValueError:
            found = {}
        text = json.dumps(found if isinstance(found, dict) else {})
    return cast(dict[str, Any], msgspec.Raw(text.encode()))


def _usage(usage: Usage) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
