"""The JSON of the Messages API's answers and events, as structs. See router/edge/openai/answer_schema.py."""

from __future__ import annotations

from typing import Any, Literal

from router.edge.openai.answer_schema import AnswerStruct, Count

MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesErrorDetail(AnswerStruct):
    type: str
    message: str


class MessagesError(AnswerStruct, kw_only=True):
    """Also an event."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


class TextBlock(AnswerStruct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(AnswerStruct, kw_only=True, tag_field="type", tag="thinking"):
    """`signature` is opaque; no router reads it."""

    thinking: str
    signature: str


class ToolUseBlock(AnswerStruct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(AnswerStruct, kw_only=True):
    """`input_tokens` are those that were not cached."""

    input_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageObject(AnswerStruct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: MessageStopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(AnswerStruct):
    input_tokens: Count


class MessageStartEvent(AnswerStruct, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: MessageObject


class PingEvent(AnswerStruct, kw_only=True):
    type: Literal["ping"] = "ping"


class BlockStartEvent(AnswerStruct, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: Count
    content_block: AnswerBlock


class TextDelta(AnswerStruct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(AnswerStruct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(AnswerStruct, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(AnswerStruct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDeltaEvent(AnswerStruct, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: Count
    delta: BlockDelta


class BlockStopEvent(AnswerStruct, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: Count


class StopDelta(AnswerStruct):
    stop_reason: MessageStopReason
    stop_sequence: str | None


class MessageDeltaEvent(AnswerStruct, kw_only=True):
    """`usage` is that of the whole answer."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessagesUsage


class MessageStopEvent(AnswerStruct, kw_only=True):
    type: Literal["message_stop"] = "message_stop"


MessageEvent = (
    MessageStartEvent
    | PingEvent
    | BlockStartEvent
    | BlockDeltaEvent
    | BlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | MessagesError
)
