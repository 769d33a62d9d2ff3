"""The parts of a chat's answer as chat completions write them: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from router.edge.openai.answer_schema import (
    AssistantMessage,
    CalledCustom,
    CalledFunction,
    ChatFinishReason,
    ChunkDelta,
    CustomDelta,
    CustomToolCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from router.model_formats.events import CallArguments, CallEnded, CallInput, CallStarted, Event, Reasoning, Text
from router.requests.answers import AnswerReader
from tandem.request import FinishReason


def chat_finish_reason(reader: AnswerReader, reason: FinishReason) -> ChatFinishReason:
    """At the answer's end."""
    is_for_calls = reader.has_calls and reason is FinishReason.STOP
    return ChatFinishReason.TOOL_CALLS if is_for_calls else ChatFinishReason(reason)


def chunk_delta(reader: AnswerReader, event: Event) -> ChunkDelta | None:
    """None: there is nothing to send."""
    match event:
        case Text():
            return ChunkDelta(content=event.text)
        case Reasoning():
            return ChunkDelta(reasoning_content=event.text)
        case CallStarted():
            call = ToolCallDelta(index=event.index, id=reader.call_id(event))
            if event.is_custom:
                call.type, call.custom = "custom", CustomDelta(name=event.name)
            else:
                call.type, call.function = "function", FunctionDelta(name=event.name)
            return ChunkDelta(tool_calls=[call])
        case CallArguments():
            function = FunctionDelta(arguments=event.text)
            return ChunkDelta(tool_calls=[ToolCallDelta(index=event.index, function=function)])
        case CallInput():
            return ChunkDelta(tool_calls=[ToolCallDelta(index=event.index, custom=CustomDelta(input=event.text))])
        case CallEnded():
            return None


def assistant_message(reader: AnswerReader, events: Sequence[Event]) -> AssistantMessage:
    """Of all events of the answer."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall | CustomToolCall] = []
    for event in events:
        match event:
            case Text():
                texts.append(event.text)
            case Reasoning():
                reasoning.append(event.text)
            case CallStarted() if event.is_custom:
                calls.append(CustomToolCall(id=reader.call_id(event), custom=CalledCustom(event.name, "")))
            case CallStarted():
                calls.append(ToolCall(id=reader.call_id(event), function=CalledFunction(event.name, "")))
            case CallArguments() if isinstance(call := calls[event.index], ToolCall):
                call.function.arguments += event.text
            case CallInput() if isinstance(call := calls[event.index], CustomToolCall):
                call.custom.input += event.text
    content = "".join(texts)
    return AssistantMessage(
        content=None if calls and not content.strip() else content,
        reasoning_content="".join(reasoning) if reasoning else UNSET,
        tool_calls=calls or UNSET,
    )
