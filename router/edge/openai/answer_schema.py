"""The JSON of every HTTP answer, as structs: the formats encode them, and the OpenAPI document is generated from them.

A field whose type includes `UnsetType` is left out of the JSON while it is UNSET. All other fields are always there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tandem.request import FinishReason

Count = Annotated[int, Meta(ge=0)]


class ChatFinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


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


# ---- Responses


class OutputText(AnswerStruct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob]


class OutputMessage(AnswerStruct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus
    content: list[OutputText]


class ReasoningText(AnswerStruct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(AnswerStruct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ResponseStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(AnswerStruct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ResponseStatus
    call_id: str
    name: str
    arguments: str


class CustomToolCallItem(AnswerStruct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ResponseStatus
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


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
    effort: str | None = None
    summary: None = None


class ResponseObject(AnswerStruct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    model: str
    status: ResponseStatus
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, str]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class EventStruct(AnswerStruct, kw_only=True):
    """`sequence_number` is set when the event is sent."""

    sequence_number: Count = 0


class ItemEvent(EventStruct, kw_only=True):
    output_index: Count = 0


class PartEvent(ItemEvent, kw_only=True):
    item_id: str
    content_index: Count = 0


class ResponseStateEvent(EventStruct, kw_only=True):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class OutputItemEvent(ItemEvent, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class ContentPartEvent(PartEvent, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDeltaEvent(PartEvent, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(PartEvent, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDeltaEvent(PartEvent, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningTextDoneEvent(PartEvent, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class ArgumentsDeltaEvent(ItemEvent, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    delta: str


class ArgumentsDoneEvent(ItemEvent, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    name: str
    arguments: str


class InputDeltaEvent(ItemEvent, kw_only=True):
    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    item_id: str
    delta: str


class InputDoneEvent(ItemEvent, kw_only=True):
    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    item_id: str
    input: str


class ResponseErrorEvent(EventStruct, kw_only=True):
    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningTextDeltaEvent
    | ReasoningTextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | InputDeltaEvent
    | InputDoneEvent
    | ResponseErrorEvent
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
    input_modalities: list[str]  # "text", and "image" if its engines take images
    parent: str | UnsetType = UNSET  # of an adapter: its model


class ModelList(AnswerStruct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class StatusAnswer(AnswerStruct):
    status: Literal["ok", "ready", "not ready"]
