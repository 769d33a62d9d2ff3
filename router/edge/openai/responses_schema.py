"""Requests of the Responses API: text, images and functions, nothing is stored. A field that needs tools of the server,
other media or a stored conversation is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.edge.openai.request_schema import MAX_TOKENS_HELP, CacheSalt, StreamOptions, TemplateSettings
from router.edge.openai.responses_input import InputItem, parse_items
from router.edge.openai.responses_tools import ResponsesToolChoice, ResponsesTools, parsed_choice
from router.edge.openai.tool_fields import tool_use
from router.edge.strict_model import (
    Items,
    StrictModel,
    at_most,
    equals,
    is_empty,
    never,
    refuse_unsupported,
    unsupported,
)
from router.requests.raw_request import RawRequest, RawSampling
from router.texts.chat import MAX_MESSAGES, Chat, Effort, Message, ToolUse
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, json_object, json_schema
from tandem.request import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
# What there is none of, as nothing is stored and no tool runs here.
_HARMLESS_INCLUDES = frozenset(
    [
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    ]
)


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema", description="JSON Schema, draft 2020-12.")
    strict: bool | None = Field(None, description="No effect: every answer satisfies its schema.")

    def constraint(self) -> Constraint | None:
        """Raises InputError."""
        if self.type == "json_schema":
            return json_schema(self.schema_, "text.format.schema")
        if self.schema_ is not None:
            raise InputError("text.format.schema: expected only with type 'json_schema'", field="text.format.schema")
        return json_object("text.format") if self.type == "json_object" else None


class TextSettings(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="No effect.")


class ReasoningFields(StrictModel):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(StrictModel):
    model: str
    input: Annotated[
        str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)], at_most(MAX_MESSAGES, "input")
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description=MAX_TOKENS_HELP)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions, as in the other APIs.
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    cache_salt: CacheSalt = None
    # No effect on the answer. Requests with the same prompt_cache_key or user prefer the same workers.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None  # ignored: nothing is stored
    prompt_cache_retention: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    image: dict[str, Any] | None = Field(None, description="No effect.")
    # Refused unless the value changes nothing.
    access_programs: object = None
    background: bool | None = None
    background_options: object = None
    context_management: object = None
    conversation: object = None
    max_tool_calls: object = None
    moderation: object = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: object = None
    prompt_cache_options: object = None
    reasoning: ReasoningFields | None = None
    text: TextSettings | None = None
    tool_choice: ResponsesToolChoice | None = None
    tools: ResponsesTools | None = None
    chat_template_kwargs: TemplateSettings | None = None
    truncation: str | None = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        other = next((each for each in self.include or () if each not in (LOGPROBS, *_HARMLESS_INCLUDES)), None)
        if other is not None:
            raise unsupported("include", f"value {other[:80]!r}")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InputError(f"top_logprobs: expected only together with include={LOGPROBS!r}", field="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: expected only together with stream=true", field="stream_options")
        messages = [Message("user", self.input)] if isinstance(self.input, str) else parse_items(self.input)
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        sampling = RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            constraint=None if self.text is None or self.text.format is None else self.text.format.constraint(),
        )
        session = self.prompt_cache_key or self.user or ""
        settings = self.chat_template_kwargs or {}
        chat = Chat(tuple(messages), self._tools(), settings, self.effort, effort_field="reasoning.effort")
        return RawRequest(self.model, chat, sampling, session, self.cache_salt or "")

    def _tools(self) -> ToolUse | None:
        """Raises InputError, UnsupportedField."""
        tools = [tool.tool(f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        return tool_use(tools, parsed_choice(self.tool_choice), self.parallel_tool_calls)


_NEUTRAL = {
    "access_programs": never,
    "background": equals(False),
    "background_options": equals({}, {"completion_window": "soonest"}),
    "context_management": is_empty,
    "conversation": never,
    "max_tool_calls": never,
    "moderation": never,
    "previous_response_id": never,
    "prompt": never,
    "prompt_cache_options": equals({}, {"mode": "implicit"}),
    "truncation": equals("disabled"),
}
