"""A client's request as every API hands it in, and as `ServingModel.parse` makes it: valid, tokenized and hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from router.texts.chat import Chat
from router.texts.chat_model import AnswerReading
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint
from tandem.images import PromptImage
from tandem.kvcache.blockhash import BlockHash
from tandem.request import SamplingParams
from tandem.v1 import worker_pb2
from worker.wire import sampling_frame

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
CHARS_PER_TOKEN_OFTEN = 8  # most texts have fewer
PREDICTION = "prediction"  # the field's name in all APIs that have it

Prompt = str | tuple[int, ...] | Chat


class RawSampling(msgspec.Struct, frozen=True):  # several per request: created faster than a frozen dataclass
    """Sampling fields from the client; None: absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    may_fill_context: bool = False  # max_tokens may be more than what the prompt leaves of the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    min_tokens: int = 0
    embeds: bool = False


class RawRequest(msgspec.Struct, frozen=True):
    model: str
    prompt: Prompt
    sampling: RawSampling
    session: str = ""  # the client's name for requests that share a prefix
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    echo: bool = False  # the prompt's text goes before the answer
    prediction: str | tuple[int, ...] | None = None  # of the answer


class ValidRequest(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    block_hashes: tuple[BlockHash, ...]
    block_tokens: int
    cache_salt: bytes = b""
    adapter: str = ""  # its fingerprint
    adapter_name: str = ""
    session: bytes | None = None  # digest
    echo: str | None = None  # text that goes before the answer
    reading: AnswerReading | None = None  # of a chat whose answer may have reasoning or calls
    prediction: tuple[int, ...] | None = None  # of the answer; in no block hash
    images: tuple[PromptImage, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def work(self, wire_id: str, answer: Sequence[int], trace_id: str = "") -> worker_pb2.Work:
        """The work of one attempt that continues after the tokens of `answer`. `trace_id`: for the worker's logs."""
        sampling, given = self.sampling, len(answer)
        if given:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - given, prompt_logprobs=None)
        return worker_pb2.Work(
            request_id=wire_id,
            prompt=[*self.prompt, *answer],
            sampling=sampling_frame(sampling),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            answer_tokens=given,
            trace_id=trace_id,
            prediction=self.prediction or (),
            images=[worker_pb2.Image(start=each.start, tokens=each.tokens, data=each.data) for each in self.images],
        )


def prompt_chars(prompt: Prompt) -> int:
    """What it costs to parse: its characters, or those that its token ids often stand for."""
    if isinstance(prompt, str):
        return len(prompt)
    return prompt.chars if isinstance(prompt, Chat) else CHARS_PER_TOKEN_OFTEN * len(prompt)


def renamed(error: InputError, field: str) -> InputError:
    """Of a prompt that has another name for the client."""
    if error.field != "prompt":
        return error
    return type(error)(error.message.replace("prompt:", f"{field}:", 1), field=field)
