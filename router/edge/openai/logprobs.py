"""OpenAI's two logprobs formats, from our tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from router.requests.detokenizer import TokenDecoder
from router.requests.output import OutToken
from tandem.v1 import inference_pb2

Json = dict[str, object]


class _Scored(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    return decoder.decode([token_id], skip_special_tokens=False)


def _entry(decoder: TokenDecoder, token_id: int, logprob: float) -> Json:
    text = token_text(decoder, token_id)
    # A token that is a part of a character has no text of its own; U+FFFD stands for it, and bytes are unknown.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def chat_logprobs(decoder: TokenDecoder, tokens: Sequence[OutToken]) -> Json | None:
    """`choices[].logprobs` of a chat completion; None when none were asked for."""
    if all(token.logprob is None for token in tokens):
        return None
    return {"content": logprob_entries(decoder, tokens), "refusal": None}


def logprob_entries(decoder: TokenDecoder, tokens: Sequence[OutToken]) -> list[Json]:
    content: list[Json] = []
    for token in tokens:
        if token.logprob is None or token.is_stop:
            continue
        entry = _entry(decoder, token.token_id, token.logprob)
        entry["top_logprobs"] = [_entry(decoder, top.token_id, top.logprob) for top in token.top]
        content.append(entry)
    return content


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, which counts text offsets over the whole text. A stop token is in it,
    as it is in the usage, though it has no text in the answer."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._offset = 0
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def push_prompt(self, prompt: Sequence[int], scores: Sequence[inference_pb2.TokenLogprobs]) -> None:
        """The prompt's first token has no logprob."""
        for token_id in prompt[:1]:
            self._push(token_text(self._decoder, token_id), None, None)
        for score in scores:
            text = token_text(self._decoder, score.token_id)
            self._push(text, score.logprob, self._top(text, score.logprob, score.top))

    def push(self, tokens: Sequence[OutToken]) -> None:
        for token in tokens:
            if token.logprob is not None:
                text = token_text(self._decoder, token.token_id)
                self._push(text, token.logprob, self._top(text, token.logprob, token.top))

    def take(self) -> Json | None:
        """The part of the tokens pushed since the last call; None when there are none."""
        if not self._tokens:
            return None
        part: Json = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._tops, self._offsets = [], [], [], []
        return part

    def _push(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._tokens.append(text)
        self._logprobs.append(logprob)
        self._tops.append(top)
        self._offsets.append(self._offset)
        self._offset += len(text)

    def _top(self, own: str, logprob: float, top: Iterable[_Scored]) -> dict[str, float]:
        """The likeliest tokens and, always, the token itself. Of several with the same text the likeliest counts."""
        found: dict[str, float] = {}
        for each in top:
            found.setdefault(token_text(self._decoder, each.token_id), each.logprob)
        found.setdefault(own, logprob)
        return found
