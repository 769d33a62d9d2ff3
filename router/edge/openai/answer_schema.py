"""The JSON of HTTP answers, as structs: the formats encode them, and the OpenAPI document is generated from them.

A field whose type includes `UnsetType` is left out of the JSON while it is UNSET. All other fields are always there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tandem.request import FinishReason

Count = Annotated[int, Meta(ge=0)]


class ChatFinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class AnswerStruct(Struct, gc=False):
    """Base of all of them. Not tracked by the garbage collector: no answer refers to itself."""


class ErrorDetail(AnswerStruct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(AnswerStruct):
    error: ErrorDetail


# ---- Chat completions and completions


class CachedTokens(AnswerStruct):
    cached_tokens: Count


class PredictionTokens(AnswerStruct):
    """Proposed from the request's `prediction`: those that the answer has, and those that it has not."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class ProposedTokens(AnswerStruct):
    """Proposed by workers from any source: those that the answer has, and those that it has not."""

    accepted_tokens: Count
    unused_tokens: Count


class CompletionUsage(AnswerStruct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | UnsetType = UNSET  # of a request with a prediction
    speculation: ProposedTokens | UnsetType = UNSET  # if there were any


class TopLogprob(AnswerStruct):
    token: str
    logprob: float | None
    bytes: list[Count] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerStruct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(AnswerStruct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[Count]


class CalledFunction(AnswerStruct):
    name: str
    arguments: str


class ToolCall(AnswerStruct, kw_only=True, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustom(AnswerStruct):
    name: str
    input: str


class CustomToolCall(AnswerStruct, kw_only=True, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustom


class AssistantMessage(AnswerStruct, kw_only=True):
    """`content` is null if the answer is calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET


class ChatChoice(AnswerStruct):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletion(AnswerStruct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionDelta(AnswerStruct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(AnswerStruct):
    name: str | UnsetType = UNSET
    input: str = ""


class ToolCallDelta(AnswerStruct, kw_only=True):
    """The first one of a call has its id, type and name; the others have further text of its arguments or input."""

    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChunkDelta(AnswerStruct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(AnswerStruct):
    index: Count
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(AnswerStruct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class CompletionChoice(AnswerStruct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(AnswerStruct, kw_only=True):
    """Also the events of a stream, which have `usage` only if `stream_options.include_usage` is set."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


# ---- Tokenizers, models, probes


class TokenizeAnswer(AnswerStruct):
    count: Count
    max_model_len: Count
    tokens: tuple[Count, ...]


class DetokenizeAnswer(AnswerStruct):
    prompt: str


class TokenizerInfo(AnswerStruct):
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None
    vocab_size: Count
    max_model_len: Count


class ModelCard(AnswerStruct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count = 0
    owned_by: Literal["tandem"] = "tandem"
    max_model_len: Count
    input_modalities: list[str]  # "text", and "image" if its engines take images
    parent: str | UnsetType = UNSET  # of an adapter: its model


class ModelList(AnswerStruct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class StatusAnswer(AnswerStruct):
    status: Literal["ok", "ready", "not ready"]
