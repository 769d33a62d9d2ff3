"""The JSON of every HTTP answer, as structs: the formats encode them, and the OpenAPI document is generated from them.

A field whose type includes `UnsetType` is left out of the JSON while it is UNSET. All other fields are always there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tandem.request import FinishReason

Count = Annotated[int, Meta(ge=0)]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


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


class CompletionUsage(AnswerStruct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


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


class AssistantMessage(AnswerStruct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(AnswerStruct):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(AnswerStruct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChunkDelta(AnswerStruct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(AnswerStruct):
    index: Count
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


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


# ---- Responses


class OutputText(AnswerStruct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob]


class OutputMessage(AnswerStruct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus
    content: list[OutputText]


class InputTokensDetails(AnswerStruct):
    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputTokensDetails(Struct, frozen=True, gc=False):
    reasoning_tokens: Count = 0


class ResponseUsage(AnswerStruct, kw_only=True):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: Count


class IncompleteDetails(AnswerStruct):
    reason: Literal["max_output_tokens"]


class ResponseError(AnswerStruct):
    code: Literal["server_error"]
    message: str


class ReasoningSettings(Struct, frozen=True, gc=False):
    effort: None = None
    summary: None = None


class TextFormat(Struct, frozen=True, gc=False):
    type: Literal["text"] = "text"


class TextSettings(Struct, frozen=True, gc=False):
    format: TextFormat = TextFormat()


class ResponseObject(AnswerStruct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    model: str
    status: ResponseStatus
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, str]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    store: bool = False
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class ResponseStateEvent(AnswerStruct):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: Count
    response: ResponseObject


class OutputItemEvent(AnswerStruct, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: Count
    output_index: Count = 0
    item: OutputMessage


class ContentPartEvent(AnswerStruct, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    part: OutputText


class TextDeltaEvent(AnswerStruct, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(AnswerStruct, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    text: str
    logprobs: list[ChatTokenLogprob]


class ResponseErrorEvent(AnswerStruct, kw_only=True):
    type: Literal["error"] = "error"
    sequence_number: Count
    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseStateEvent | OutputItemEvent | ContentPartEvent | TextDeltaEvent | TextDoneEvent | ResponseErrorEvent
)


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


class ModelList(AnswerStruct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class StatusAnswer(AnswerStruct):
    status: Literal["ok", "ready", "not ready"]
