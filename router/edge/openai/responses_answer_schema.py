"""The JSON of the Responses API's answers, as `answer_schema` has that of the others."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from router.edge.openai.answer_schema import AnswerStruct, ChatTokenLogprob, Count

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(AnswerStruct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
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
    summary: list[Any] = field(default_factory=list)
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
    tools: list[Any] = field(default_factory=list)
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
