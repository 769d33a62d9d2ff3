"""The OpenAI API's requests as we accept them. A field is either served, or refused by name; nothing is ignored that
could change the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.request import Message, RawRequest, RawSampling
from tandem.errors import InputError, UnsupportedField
from tandem.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: we add no padding


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: object = None
    annotations: object = None
    tool_calls: object = None
    tool_call_id: object = None
    function_call: object = None

    def parse(self, index: int) -> Message:
        """Raises InputError, UnsupportedField."""
        for field in ("tool_calls", "tool_call_id", "function_call", "audio"):
            if getattr(self, field):
                raise _unsupported(f"messages.{index}.{field}")
        if self.role in ("tool", "function"):
            raise _unsupported(f"messages.{index}.role", f"value {self.role!r}")
        if self.content is None:
            raise InputError(
                f"messages.{index}.content: expected text, got nothing", field=f"messages.{index}.content"
            )
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class _Common(_Strict):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Known but not yet supported; checked against the values that change nothing.
    n: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _check(self, neutral: dict[str, Callable[[object], bool]]) -> None:
        for field, is_neutral in {**_NEUTRAL_COMMON, **neutral}.items():
            value = getattr(self, field)
            if value is not None and not is_neutral(value):
                raise _unsupported(field)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: expected only together with stream=true", field="stream_options")

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> RawSampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._logit_bias(),
        )

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias or {}
        if len(given) > MAX_LOGIT_BIAS:
            raise InputError(f"logit_bias: expected at most {MAX_LOGIT_BIAS}, got {len(given)}", field="logit_bias")
        wrong = next((key for key in given if not _TOKEN_ID.fullmatch(key)), None)
        if wrong is not None:
            raise InputError(f"logit_bias: expected token ids as keys, got {wrong[:40]!r}", field="logit_bias")
        return tuple((int(key), bias) for key, bias in given.items())


class ChatCompletionRequest(_Common):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    functions: object = None
    function_call: object = None
    response_format: object = None
    audio: object = None
    modalities: object = None
    moderation: object = None
    prediction: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    reasoning_effort: object = None
    verbosity: object = None
    web_search_options: object = None

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        self._check(_NEUTRAL_CHAT)
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs: expected only together with logprobs=true", field="top_logprobs")
        limits = {each for each in (self.max_tokens, self.max_completion_tokens) if each is not None}
        if len(limits) > 1:
            raise InputError(
                f"max_completion_tokens: expected the same as max_tokens ({self.max_tokens}) or only one of them, "
                f"got {self.max_completion_tokens}",
                field="max_completion_tokens",
            )
        messages = tuple(message.parse(index) for index, message in enumerate(self.messages))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return RawRequest(self.model, messages, self._sampling(next(iter(limits), None), logprobs))


class CompletionRequest(_Common):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        self._check(_NEUTRAL_COMPLETION)
        return RawRequest(self.model, self._prompt(), self._sampling(self.max_tokens, self.logprobs))

    def _prompt(self) -> str | tuple[int, ...]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if not prompt:
            raise InputError("prompt: expected a text or token ids, got an empty list", field="prompt")
        first = prompt[0]
        if isinstance(first, int):
            return tuple(each for each in prompt if isinstance(each, int))
        if len(prompt) > 1:
            raise UnsupportedField(
                f"prompt: expected one prompt per request, got {len(prompt)}; send one request for each", field="prompt"
            )
        return first if isinstance(first, str) else tuple(first)


def _equals(*neutral: object) -> Callable[[object], bool]:
    return lambda value: value in neutral


def _is_empty(value: object) -> bool:
    return value in ([], {}, "")


def _never(value: object) -> bool:
    return False


# For each known but unsupported field, the values that change nothing.
_NEUTRAL_COMMON: dict[str, Callable[[object], bool]] = {
    "n": _equals(1),
}
_NEUTRAL_CHAT: dict[str, Callable[[object], bool]] = {
    "tools": _is_empty,
    "tool_choice": _equals("none"),
    "parallel_tool_calls": _equals(True),
    "functions": _is_empty,
    "function_call": _equals("none"),
    "response_format": _equals({"type": "text"}),
    "modalities": _equals(["text"]),
    "audio": _never,
    "moderation": _never,
    "prediction": _never,
    "prompt_cache_options": _never,
    "prompt_cache_retention": _never,
    "reasoning_effort": _never,
    "verbosity": _never,
    "web_search_options": _never,
}
_NEUTRAL_COMPLETION: dict[str, Callable[[object], bool]] = {
    "best_of": _equals(1),
    "echo": _equals(False),
    "suffix": _is_empty,
}

Request = TypeVar("Request", ChatCompletionRequest, CompletionRequest)


def parse_body(kind: type[Request], body: bytes) -> Request:
    """Raises InputError naming the field, with the first thing that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part)) or None
        if first["type"] == "extra_forbidden":
            raise InputError(f"unknown field {field!r}", field=field) from None
        if first["type"] == "json_invalid":
            raise InputError(f"body: expected JSON in UTF-8: {first['msg']}") from None
        raise InputError(f"{field or 'body'}: {_lower_first(first['msg'])}", field=field) from None


def _is_union_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union in the location; the client wrote no such key."""
    return isinstance(part, str) and (part in ("str", "int", "float") or "[" in part or part == "TextPart")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _unsupported(field: str, what: str = "this value") -> UnsupportedField:
    return UnsupportedField(f"{field}: {what} is not supported yet; leave the field out", field=field)
