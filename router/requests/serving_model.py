"""The router's part of one served model: parses and validates the requests of every API into one type.

Long prompts are tokenized and hashed in a thread, so that they do not delay the tokens of other requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from router.admission.parse_threads import ParseThreads
from router.model_formats.registry import formats_of
from router.request_ids import new_request_id
from router.requests.raw_request import (
    CHARS_PER_TOKEN_OFTEN,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    PREDICTION,
    Prompt,
    RawRequest,
    RawSampling,
    ValidRequest,
    prompt_chars,
)
from router.texts.chat import Chat
from router.texts.chat_model import AnswerReading, ChatModel, RenderedChat
from router.texts.detokenizer import stop_automaton
from router.texts.grammar_check import GrammarChecker
from tandem.checkpoint.json_fields import read_json_object
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.launch import ServedModel
from tandem.config.model import SamplingDefaults, SpecialTokens
from tandem.errors import CheckpointError, ContextExceeded, InputError, InternalError, shown
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.constraint import Constraint
from tandem.images import ExpandedPrompt, PromptImage, check_spans
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, check_length
from tandem.text.chat_template import ChatTemplate
from tandem.text.special_texts import encode_marked
from tandem.text.tokenizer import Tokenizer

INLINE_PROMPT_CHARS = 2048  # shorter prompts are tokenized on the event loop
INLINE_PROMPT_TOKENS = 512
INLINE_STOP_CHARS = 256
MAX_PROMPT_SCORES = 1 << 18  # logprobs of one prompt: tokens x (1 + alternatives per token)
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by generation_config.json
CHARS_PER_TOKEN_LIMIT = 64  # more than the longest text of any token

Expand = Callable[[Sequence[int], Sequence[bytes]], Awaitable[ExpandedPrompt]]  # as `ImageExpander.expand`, of a model


class _Prompted(msgspec.Struct, frozen=True):
    """`field`: the client's, for errors. `constraint`: to check."""

    field: str
    tokens: tuple[int, ...]
    constraint: Constraint | None
    reading: AnswerReading | None
    images: tuple[PromptImage, ...] = ()


class ServingModel:
    """The router's part of one served model: tokenizer, chat template and limits. With an adapter, `name` is the
    adapter's, `base` the model's, and `adapter` the fingerprint."""

    adapter = ""

    def __init__(
        self, served: ServedModel, tokenizer: Tokenizer, template: ChatTemplate | None, config: ModelConfig
    ) -> None:
        self.name = self.base = served.name
        self.tokenizer = tokenizer
        self.vocab_tokens = config.vocab_size
        self.hidden_size = config.hidden_size
        self._served = served
        self._template = template
        self._defaults = RawSampling()
        if served.sampling_defaults is SamplingDefaults.CHECKPOINT:
            self._defaults = sampling_defaults(Path(served.model_dir))
        formats = formats_of(template, config.architecture, served.tool_parser, served.reasoning_parser)
        self._chats = None
        if template is not None:
            keeps_text = served.special_tokens_in_messages is SpecialTokens.TEXT
            self._chats = ChatModel(served.name, template, tokenizer, formats, keeps_text=keeps_text)
        self._eos = frozenset(config.eos_token_ids)
        self._bos = config.bos_token_id
        limits = (config.max_position_tokens, served.max_model_tokens)
        self.max_model_tokens = min(limit for limit in limits if limit is not None)
        self._grammars = GrammarChecker(
            partial(GrammarCompiler.load, Path(served.model_dir), config.vocab_size, sorted(self._eos))
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    def with_adapter(self, name: str, fingerprint: str) -> ServingModel:
        """The same model, which answers with an adapter."""
        adapted = copy(self)
        adapted.name, adapted.adapter = name, fingerprint
        return adapted

    @classmethod
    def load(cls, served: ServedModel) -> ServingModel:
        """Raises CheckpointError if the directory lacks a usable tokenizer or config."""
        folder = Path(served.model_dir)
        return cls(served, Tokenizer.load(folder), ChatTemplate.load(folder), ModelConfig.of_any(folder))

    async def parse(
        self,
        raw: RawRequest,
        threads: ParseThreads,
        *,
        tenant: str = "",
        max_model_tokens: int | None = None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        expand: Expand | None = None,
    ) -> ValidRequest:
        """`max_model_tokens`: the workers' limit, if lower. `cache_salt`: derived from the client's and the tenant's,
        at most 64 bytes. `expand`: for the images of a chat; None: it may have none. Raises InputError with the
        field."""
        limit = min(max_model_tokens or self.max_model_tokens, self.max_model_tokens)
        request_id = request_id or new_request_id()
        stop_chars = sum(map(len, raw.sampling.stop))
        texts = [raw.prompt, *([] if raw.prediction is None else [raw.prediction])]
        chars = sum(map(prompt_chars, texts)) + stop_chars
        images = raw.prompt.images if isinstance(raw.prompt, Chat) else ()
        if images and expand is None:
            raise InputError("messages: expected text alone, got images", field="messages")
        work = partial(self._parse, raw, limit, request_id, cache_salt)
        if all(map(_is_short, texts)) and stop_chars <= INLINE_STOP_CHARS:
            request, constraint = work()
        else:
            request, constraint = await threads.run(tenant, chars, work)
        if constraint is not None:
            await self._grammars.check(constraint, threads, tenant)
        if images and expand is not None:  # once all else is known to be right
            expanded = await expand(request.prompt, images)
            request = await threads.run(
                tenant, chars, partial(self._with_images, raw, limit, request, constraint, expanded)
            )
        return request

    async def tokenize(
        self, prompt: str | Chat, threads: ParseThreads, tenant: str, *, special_tokens: bool
    ) -> tuple[int, ...]:
        """Returns the token ids of a prompt. Raises InputError, ContextExceeded."""
        work = partial(self.tokens, prompt, self.max_model_tokens, special_tokens=special_tokens)
        return work() if _is_short(prompt) else await threads.run(tenant, prompt_chars(prompt), work)

    async def detokenize(self, tokens: Sequence[int], threads: ParseThreads, tenant: str) -> str:
        """Raises InputError."""

        def decode() -> str:
            self._check_ids("tokens", tokens)
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        if len(tokens) <= INLINE_PROMPT_TOKENS:
            return decode()
        return await threads.run(tenant, len(tokens) * CHARS_PER_TOKEN_OFTEN, decode)

    def tokenizer_info(self) -> dict[str, str | int | None]:
        """Tokenizer facts for clients that tokenize themselves."""
        eos, bos = min(self._eos, default=None), self._bos
        return {
            "eos_token": None if eos is None else self.tokenizer.token(eos),
            "bos_token": None if bos is None else self.tokenizer.token(bos),
            "pad_token": None,
            "chat_template": None if self._template is None else self._template.source,
            "vocab_size": self.vocab_tokens,
            "max_model_len": self.max_model_tokens,
        }

    def tokens(
        self, prompt: Prompt, limit: int, *, special_tokens: bool = True, field: str = "prompt"
    ) -> tuple[int, ...]:
        """Returns the token ids of a prompt, at most `limit`. `special_tokens`: adds those that the checkpoint puts
        around a text. Raises InputError, ContextExceeded."""
        if isinstance(prompt, str):
            self._check_chars(field, prompt, limit)
            return tuple(self.tokenizer.encode(prompt, add_special_tokens=special_tokens))
        if isinstance(prompt, Chat):
            return self._chat_tokens(self._rendered(prompt, None).text, limit)
        self.check_tokens(field, len(prompt), limit)
        self._check_ids(field, prompt)
        return prompt

    def check_tokens(self, field: str, count: int, limit: int | None = None) -> None:
        """Checks the length before any token is checked. Raises ContextExceeded."""
        limit = self.max_model_tokens if limit is None else limit
        if count > limit:
            raise _too_long(field, count, limit)

    def _rendered(self, chat: Chat, asked: Constraint | None) -> RenderedChat:
        if self._chats is None:
            raise InputError(
                f"messages: model {self.name!r} has no chat template; send plain text instead: the completions API, "
                "`prompt` over gRPC, `tandem chat --raw`",
                field="messages",
            )
        return self._chats.rendered(chat, asked)

    def _chat_tokens(self, text: str, limit: int) -> tuple[int, ...]:
        self._check_chars("messages", text, limit)
        return tuple(encode_marked(self.tokenizer, text))

    def _check_chars(self, field: str, text: str, limit: int) -> None:
        """Refuses a text that cannot fit, before all of it is tokenized. Raises ContextExceeded."""
        if len(text) > limit * CHARS_PER_TOKEN_LIMIT:
            raise ContextExceeded(
                f"{field}: {_context(limit)}, too few for {len(text)} characters; shorten the text",
                field=field,
            )
        if len(text) > limit * CHARS_PER_TOKEN_OFTEN:
            begin = self.tokenizer.encode(text[: limit * CHARS_PER_TOKEN_OFTEN], add_special_tokens=False)
            if len(begin) > limit + limit // 4:  # a few tokens may differ at the cut
                raise _too_long(field, f"more than {limit}", limit)

    def _parse(
        self, raw: RawRequest, limit: int, request_id: str, cache_salt: bytes
    ) -> tuple[ValidRequest, Constraint | None]:
        """And the constraint to check."""
        return self._valid(raw, limit, request_id, cache_salt, self._prompted(raw, limit))

    def _with_images(
        self,
        raw: RawRequest,
        limit: int,
        request: ValidRequest,
        constraint: Constraint | None,
        expanded: ExpandedPrompt,
    ) -> ValidRequest:
        assert isinstance(raw.prompt, Chat)
        self._check_expanded(expanded, len(raw.prompt.images))
        images = tuple(
            PromptImage.of(start, tokens, data)
            for (start, tokens), data in zip(expanded.spans, raw.prompt.images, strict=True)
        )
        prompted = _Prompted("messages", expanded.tokens, constraint, request.reading, images)
        return self._valid(raw, limit, request.request_id, request.cache_salt, prompted)[0]

    def _check_expanded(self, expanded: ExpandedPrompt, images: int) -> None:
        """Raises InternalError for what no worker should send."""
        try:
            self._check_ids("prompt", expanded.tokens)
            check_spans(expanded.spans, len(expanded.tokens))
        except InputError as error:
            raise InternalError(f"a worker expanded a prompt wrongly: {error}") from error
        if (got := len(expanded.spans)) != images:
            raise InternalError(f"a worker expanded a prompt wrongly: expected {images} images, got {got}")

    def _prompted(self, raw: RawRequest, limit: int) -> _Prompted:
        constraint = raw.sampling.constraint
        if isinstance(raw.prompt, Chat):
            chat = self._rendered(raw.prompt, constraint)
            return _Prompted("messages", self._chat_tokens(chat.text, limit), chat.constraint, chat.reading)
        return _Prompted("prompt", self.tokens(raw.prompt, limit), constraint, None)

    def _valid(
        self, raw: RawRequest, limit: int, request_id: str, cache_salt: bytes, prompted: _Prompted
    ) -> tuple[ValidRequest, Constraint | None]:
        field, prompt, constraint = prompted.field, prompted.tokens, prompted.constraint
        if not prompt:
            raise InputError(f"{field}: expected at least one token, got none", field=field)
        room = limit - len(prompt)
        if room < 1:
            raise _too_long(field, len(prompt), limit)
        if (top := raw.sampling.prompt_logprobs) is not None and (top + 1) * len(prompt) > MAX_PROMPT_SCORES:
            most = MAX_PROMPT_SCORES // (top + 1)
            raise InputError(
                f"{field}: expected at most {most} tokens with {top + 1} logprobs for each, got {len(prompt)}; "
                "shorten the prompt or ask for fewer logprobs",
                field=field,
            )
        served = self._served
        key = HashKey(served.model_fingerprint, self.adapter, cache_salt)
        hashes = hash_blocks(prompt, served.block_tokens, key, images=prompted.images)
        request = ValidRequest(
            request_id=request_id,
            model=self.base,
            prompt=prompt,
            sampling=self._sampling(raw.sampling, len(prompt), room, constraint),
            stop=_stop_strings(raw.sampling.stop),
            block_hashes=tuple(hashes),
            block_tokens=served.block_tokens,
            cache_salt=cache_salt,
            adapter=self.adapter,
            adapter_name=self.name if self.adapter else "",
            session=_session(raw.session, cache_salt) if raw.session else None,
            echo=self._text(raw.prompt, prompt) if raw.echo else None,
            reading=prompted.reading,
            images=prompted.images,
            prediction=None if raw.prediction is None else self._prediction(raw.prediction, limit),
        )
        return request, constraint

    def _prediction(self, given: str | tuple[int, ...], limit: int) -> tuple[int, ...]:
        tokens = self.tokens(given, limit, special_tokens=False, field=PREDICTION)
        self.check_tokens(PREDICTION, len(tokens), limit)
        return tokens

    def _text(self, raw: Prompt, prompt: tuple[int, ...]) -> str:
        """The prompt as the client sent it, if that was a text."""
        return raw if isinstance(raw, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    def _sampling(
        self, raw: RawSampling, prompt_tokens: int, room: int, constraint: Constraint | None
    ) -> SamplingParams:
        check_length("stop_token_ids", len(raw.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_length("logit_bias", len(raw.logit_bias), MAX_LOGIT_BIAS)
        self._check_ids("stop_token_ids", raw.stop_token_ids)
        self._check_ids("logit_bias", tuple(token for token, _ in raw.logit_bias))
        stop_ids = frozenset(raw.stop_token_ids)
        if raw.max_tokens is not None and raw.max_tokens > room and not raw.may_fill_context:
            raise ContextExceeded(
                f"max_tokens: {_context(prompt_tokens + room)}, and the prompt has {prompt_tokens}; expected at most "
                f"{room}, got {shown(raw.max_tokens)}; lower max_tokens or leave it out",
                field="max_tokens",
            )
        max_tokens = room if raw.max_tokens is None else min(raw.max_tokens, room)
        if raw.min_tokens > max_tokens:
            raise InputError(
                f"min_tokens: expected at most max_tokens ({max_tokens}), got {shown(raw.min_tokens)}",
                field="min_tokens",
            )
        default = self._defaults
        return SamplingParams.parse(
            # Drawn by the router, so that any worker can repeat the sampling.
            seed=secrets.randbits(63) if raw.seed is None else raw.seed,
            max_tokens=max_tokens,
            temperature=default.temperature if raw.temperature is None else raw.temperature,
            top_p=default.top_p if raw.top_p is None else raw.top_p,
            top_k=default.top_k if raw.top_k is None else raw.top_k,
            min_p=default.min_p if raw.min_p is None else raw.min_p,
            stop_token_ids=stop_ids if raw.ignore_eos else stop_ids | self._eos,
            logprobs=raw.logprobs,
            presence_penalty=raw.presence_penalty,
            frequency_penalty=raw.frequency_penalty,
            repetition_penalty=default.repetition_penalty if raw.repetition_penalty is None else raw.repetition_penalty,
            logit_bias=dict(raw.logit_bias),
            prompt_logprobs=raw.prompt_logprobs,
            grammar=None if constraint is None else constraint.grammar,
            min_tokens=raw.min_tokens,
            embeds=raw.embeds,
        )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        wrong = next((each for each in ids if not 0 <= each < self.vocab_tokens), None)
        if wrong is not None:
            raise InputError(
                f"{field}: expected token ids from 0 to {self.vocab_tokens - 1}, got {shown(wrong)}", field=field
            )


def sampling_defaults(model_dir: Path) -> RawSampling:
    """Of the checkpoint's `generation_config.json`. Raises CheckpointError naming the file."""
    path = model_dir / "generation_config.json"
    if not path.exists():
        return RawSampling()
    given = read_json_object(path)
    number: dict[str, Any] = {name: given.get(name) for name in _DEFAULTED}
    try:
        for name, value in number.items():
            if not isinstance(value, int | float | None):
                raise InputError(f"{name}: expected a number, got {type(value).__name__}", field=name)
        SamplingParams.parse(seed=0, max_tokens=1, **number)
    except InputError as error:
        raise CheckpointError(f"{path}: {error.message}", field="model") from error
    return RawSampling(**number)


def _session(name: str, cache_salt: bytes) -> bytes:
    """The salt as key separates sessions of the same name of different tenants."""
    return blake2b(name.encode("utf-8", "replace"), digest_size=8, key=cache_salt).digest()


def _too_long(field: str, tokens: int | str, limit: int) -> ContextExceeded:
    found = f"the prompt has {tokens} and leaves no room for an answer; shorten it to at most {limit - 1}"
    if field == PREDICTION:
        found = f"the prediction has {tokens}; shorten it to at most {limit}, or leave it out"
    return ContextExceeded(f"{field}: {_context(limit)}; {found}", field=field)


def _context(tokens: int) -> str:
    """Clients look for these words."""
    return f"This model's maximum context length is {tokens} tokens"


def _stop_strings(stop: tuple[str, ...]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InputError(f"stop: expected at most {MAX_STOP_STRINGS} strings, got {len(stop)}", field="stop")
    for each in stop:
        if not 0 < len(each) <= MAX_STOP_STRING_CHARS:
            raise InputError(
                f"stop: expected strings of 1 to {MAX_STOP_STRING_CHARS} characters, got {len(each)}", field="stop"
            )
    stop_automaton(stop)  # here, because building a large one takes long
    return stop


def _is_short(prompt: Prompt) -> bool:
    return (
        len(prompt) <= INLINE_PROMPT_TOKENS
        if isinstance(prompt, tuple)
        else (prompt_chars(prompt) <= INLINE_PROMPT_CHARS)
    )
