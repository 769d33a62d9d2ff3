"""Requests of the chat completions and completions APIs. A field is either served or refused by name: the router
ignores no field that could change the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from pydantic import ValidatorFunctionWrapHandler as Handler

from router.edge.openai.chat_messages import Messages, TextPart, parse_messages
from router.edge.openai.constraint_fields import AnyFormat, ConstraintFields
from router.edge.openai.tool_fields import ToolChoice, Tools, parsed_tools, tool_use
from router.edge.strict_model import (
    Items,
    Neutral,
    StrictModel,
    equals,
    is_empty,
    never,
    refuse_unsupported,
    unsupported,
)
from router.requests.raw_request import MAX_CACHE_SALT_CHARS, RawRequest, RawSampling
from router.texts.chat import Chat, Effort
from tandem.errors import InputError, shown
from tandem.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_CHOICES = 128  # answers to one request: prompts times `n`
MAX_SETTINGS = 32
COMPLETION_TOKENS = 16  # OpenAI's default

TemplateSettings = Annotated[dict[str, Any], Field(max_length=MAX_SETTINGS)]
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None


class UsageEvents(Enum):
    """Which events of a stream have `usage`."""

    NONE = "none"
    LAST = "last"
    EACH = "each"


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect, as the router adds no padding
    continuous_usage_stats: bool | None = Field(None, description="`usage` in every event; as in vLLM.")


MAX_TOKENS_HELP = (
    "At most the rest of the context after the prompt, which is also the default. With logprobs it is less if "
    "all answers would have more than 1,048,576 logprobs."
)


class Prediction(StrictModel):
    """What the client expects the answer to be like."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _GenerationRequest(ConstraintFields):
    """Ranges that all edges share are checked by `tandem.request.SamplingParams`; stop strings by
    `router.requests.serving_model`."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description=MAX_TOKENS_HELP)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Stop tokens end the answer only once it has so many tokens. Stop strings always do."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: CacheSalt = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: AnyFormat | None = None
    prediction: Prediction | None = Field(
        None,
        description="What the answer is likely to be, or to repeat in part: such tokens may come several at a time. It "
        "changes the answer no more than speculation does.",
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    detokenize: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def usage(self) -> UsageEvents:
        options = self.stream_options
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return UsageEvents.NONE
        return UsageEvents.EACH if options.continuous_usage_stats else UsageEvents.LAST

    def _check(self, neutral: Neutral) -> None:
        refuse_unsupported(self, neutral | _NEUTRAL_EXTENSIONS)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: expected only together with stream=true", field="stream_options")

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> RawSampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._logit_bias(),
            constraint=self._constraint(self.response_format),
        )

    def _predicted(self) -> str | None:
        return None if self.prediction is None else self.prediction.text

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias or {}
        if len(given) > MAX_LOGIT_BIAS:
            raise InputError(f"logit_bias: expected at most {MAX_LOGIT_BIAS}, got {len(given)}", field="logit_bias")
        wrong = next((key for key in given if not _TOKEN_ID.fullmatch(key)), None)
        if wrong is not None:
            raise InputError(f"logit_bias: expected token ids as keys, got {wrong[:40]!r}", field="logit_bias")
        return tuple((int(key), bias) for key, bias in given.items())


class ChatCompletionRequest(_GenerationRequest):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="The same as `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    chat_template_kwargs: TemplateSettings | None = Field(
        None, description="Settings of the model's chat template, such as `enable_thinking`."
    )
    functions: object = None
    function_call: object = None
    audio: object = None
    modalities: object = None
    moderation: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    reasoning_effort: Effort | None = Field(
        None, description="As the model's chat template has it; `none`: no thinking."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="No effect.")
    web_search_options: object = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        self._check(_NEUTRAL_CHAT)
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs: expected only together with logprobs=true", field="top_logprobs")
        limits = {each for each in (self.max_tokens, self.max_completion_tokens) if each is not None}
        if len(limits) > 1:
            raise InputError(
                f"max_completion_tokens: expected the same as max_tokens ({shown(self.max_tokens or 0)}) or only "
                f"one of them, got {shown(self.max_completion_tokens or 0)}",
                field="max_completion_tokens",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(next(iter(limits), None), logprobs)
        session = self.prompt_cache_key or self.user or ""
        return RawRequest(
            self.model, self._chat(), sampling, session, self.cache_salt or "", prediction=self._predicted()
        )

    def _chat(self) -> Chat:
        use = tool_use(parsed_tools(self.tools), self.tool_choice, self.parallel_tool_calls)
        return Chat(parse_messages(self.messages), use, self.chat_template_kwargs or {}, self.reasoning_effort)


def checked_prompts(field: str, most: int, given: object, check: Handler) -> object:
    """Checks a list as a whole first: otherwise each branch of the union would validate each item."""
    if isinstance(given, list) and given:
        if set(map(type, given)) == {int}:
            return given
        if len(given) > most and not isinstance(given[0], int):
            raise InputError(
                f"{field}: expected at most {most} texts or lists of token ids, got {len(given)}", field=field
            )
    return check(given)


def listed(
    field: str, given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
) -> list[str | tuple[int, ...]]:
    """The prompts of a field of one or several. Raises InputError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError(f"{field}: expected a text or token ids, got an empty list", field=field)
    prompts: list[Any] = list(given)
    if isinstance(prompts[0], int):
        return [tuple(prompts)]
    return [each if isinstance(each, str) else tuple(each) for each in prompts]


class CompletionRequest(_GenerationRequest):
    prompt: Annotated[
        str | Items[int] | Items[str] | Items[Items[int]],
        WrapValidator(partial(checked_prompts, "prompt", MAX_CHOICES)),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="At most the rest of the context after the prompt. Absent: 16. 0 is for `echo` only."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_cache_key: str | None = Field(None, description="As `user`, which it goes before.")
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def is_prompt_only(self) -> bool:
        """True for max_tokens 0, which returns the logprobs of the prompt only."""
        return self.max_tokens == 0

    def parse(self) -> list[RawRequest]:
        """One request per prompt. Raises InputError, UnsupportedField."""
        self._check(_NEUTRAL_COMPLETION)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "a value other than n")
        if self.is_prompt_only and not self.echo:
            raise InputError("max_tokens: expected at least 1, or 0 together with echo=true", field="max_tokens")
        sampling = self._sampling(
            COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens),
            self.logprobs,
            self.logprobs if self.echo else None,
        )
        prompts = listed("prompt", self.prompt)
        if (total := len(prompts) * (self.n or 1)) > MAX_CHOICES:
            field = "prompt" if len(prompts) > 1 else "n"
            raise InputError(f"{field}: expected at most {MAX_CHOICES} prompts times n, got {total}", field=field)
        session, salt = self.prompt_cache_key or self.user or "", self.cache_salt or ""
        echo, predicted = bool(self.echo), self._predicted()
        return [
            RawRequest(self.model, each, sampling, session, salt, echo=echo, prediction=predicted) for each in prompts
        ]


_NEUTRAL_CHAT: Neutral = {
    "functions": is_empty,
    "function_call": equals("none"),
    "modalities": equals(["text"]),
    "audio": never,
    "moderation": never,
    "prompt_cache_options": equals({}, {"mode": "implicit"}),
    "add_generation_prompt": equals(True),
    "continue_final_message": equals(False),
    "web_search_options": never,
}
_NEUTRAL_COMPLETION: Neutral = {
    "suffix": is_empty,
}
# Of other servers; Tandem does what these values ask for.
_NEUTRAL_EXTENSIONS: Neutral = {
    "skip_special_tokens": equals(True),
    "spaces_between_special_tokens": equals(True, False),
    "include_stop_str_in_output": equals(False),
    "use_beam_search": equals(False),
    "length_penalty": equals(1),
    "early_stopping": equals(False),
    "detokenize": equals(True),
    "truncate_prompt_tokens": never,
}
