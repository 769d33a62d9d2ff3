"""Requests of the Responses API: text in, text out, nothing is stored. A field that needs tools, other media, reasoning
or a stored conversation is refused by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from router.edge.openai.request_schema import (
    MAX_MESSAGES,
    MAX_TOKENS_HELP,
    CacheSalt,
    StreamOptions,
    equals,
    is_empty,
    never,
    refuse_unsupported,
    unsupported,
)
from router.edge.openai.strict_model import Items, StrictModel, at_most
from router.requests.validation import Message, RawRequest, RawSampling
from tandem.errors import InputError
from tandem.request import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"


class TextContent(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None  # of an earlier answer that the client sends again
    logprobs: object = None


class InputItem(StrictModel):
    """A message. Items of another type are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = "message"
    role: str | None = None
    content: str | Items[TextContent] | None = None
    id: str | None = None
    status: str | None = None
    phase: object = None

    def parse(self, index: int) -> Message:
        """Raises InputError, UnsupportedField."""
        path = f"input.{index}"
        if self.type != "message":
            raise unsupported(f"{path}.type", f"value {self.type[:40]!r}")
        if self.model_extra:
            field = f"{path}.{next(iter(self.model_extra))}"
            raise InputError(f"unknown field {field!r}", field=field)
        if self.role not in ("system", "developer", "user", "assistant"):
            raise InputError(
                f"{path}.role: expected system, developer, user or assistant, got {self.role!r}", field=f"{path}.role"
            )
        if self.content is None:
            raise InputError(f"{path}.content: expected text, got nothing", field=f"{path}.content")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


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
    top_k: Annotated[int, Field(ge=0)] | None = None
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
    # Refused unless the value changes nothing.
    background: bool | None = None
    context_management: object = None
    conversation: object = None
    max_tool_calls: object = None
    moderation: object = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    reasoning: object = None
    text: object = None
    tool_choice: object = None
    tools: object = None
    truncation: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        other = next((each for each in self.include or () if each != LOGPROBS), None)
        if other is not None:
            raise unsupported("include", f"value {other[:80]!r}")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InputError(f"top_logprobs: expected only together with include={LOGPROBS!r}", field="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: expected only together with stream=true", field="stream_options")
        if isinstance(self.input, str):
            messages = [Message("user", self.input)]
        else:
            messages = [item.parse(index) for index, item in enumerate(self.input)]
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        sampling = RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )
        session = self.prompt_cache_key or self.user or ""
        return RawRequest(self.model, tuple(messages), sampling, session, self.cache_salt or "")


_NEUTRAL = {
    "background": equals(False),
    "context_management": is_empty,
    "conversation": never,
    "max_tool_calls": never,
    "moderation": never,
    "parallel_tool_calls": equals(True, False),
    "previous_response_id": never,
    "prompt": never,
    "prompt_cache_options": never,
    "prompt_cache_retention": never,
    "reasoning": is_empty,
    "text": equals({}, {"format": {"type": "text"}}),
    "tool_choice": equals("none", "auto"),
    "tools": is_empty,
    "truncation": equals("disabled"),
}
