"""The parts of a chat's answer as chat completions write them: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from router.edge.openai.answer_schema import (
    AssistantMessage,
    CalledFunction,
    ChatFinishReason,
    ChunkDelta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from router.model_formats.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, Text
from router.requests.chat_model import AnswerReading
from tandem.request import FinishReason


class AnswerParts:
    """Reads one answer. `call_id`: the id of a call, if the model writes none."""

    def __init__(self, reading: AnswerReading, call_id: Callable[[int], str]) -> None:
        self._parser = reading.parser()
        self._call_id = call_id
        self._has_calls = False

    def feed(self, text: str) -> list[Event]:
        return self._noted(self._parser.feed(text)) if text else []

    def finish(self) -> list[Event]:
        return self._noted(self._parser.finish())

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        if self._has_calls and reason is FinishReason.STOP:
            return ChatFinishReason.TOOL_CALLS
        return ChatFinishReason(reason)

    def delta(self, event: Event) -> ChunkDelta | None:
        """None: there is nothing to send."""
        match event:
            case Text():
                return ChunkDelta(content=event.text)
            case Reasoning():
                return ChunkDelta(reasoning_content=event.text)
            case CallStarted():
                function = FunctionDelta(name=event.name)
                call = ToolCallDelta(index=event.index, id=self._id(event), type="function", function=function)
                return ChunkDelta(tool_calls=[call])
            case CallArguments():
                return ChunkDelta(
                    tool_calls=[ToolCallDelta(index=event.index, function=FunctionDelta(UNSET, event.text))]
                )
            case CallEnded():
                return None

    def message(self, events: Sequence[Event]) -> AssistantMessage:
        """Of all events of the answer."""
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for event in events:
            match event:
                case Text():
                    texts.append(event.text)
                case Reasoning():
                    reasoning.append(event.text)
                case CallStarted():
                    calls.append(ToolCall(id=self._id(event), function=CalledFunction(event.name, "")))
                case CallArguments():
                    calls[event.index].function.arguments += event.text
        content = "".join(texts)
        return AssistantMessage(
            content=None if calls and not content.strip() else content,
            reasoning_content="".join(reasoning) if reasoning else UNSET,
            tool_calls=calls or UNSET,
        )

    def _noted(self, events: list[Event]) -> list[Event]:
        self._has_calls = self._has_calls or any(isinstance(each, CallEnded) for each in events)
        return events

    def _id(self, event: CallStarted) -> str:
        return event.id or self._call_id(event.index)
