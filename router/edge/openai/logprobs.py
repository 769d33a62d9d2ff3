"""OpenAI's two formats of logprobs, built from the router's tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from router.edge.openai.answer_schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from router.requests.detokenizer import TokenDecoder
from router.requests.output import OutToken
from tandem.v1 import inference_pb2


class _Scored(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    return decoder.decode([token_id], skip_special_tokens=False)


def _bytes_of(text: str) -> list[int] | None:
    """None for a token that is part of a character: its text is U+FFFD, and its bytes are unknown."""
    return None if "\ufffd" in text else list(text.encode())


def _top_logprob(decoder: TokenDecoder, scored: _Scored) -> TopLogprob:
    text = token_text(decoder, scored.token_id)
    return TopLogprob(text, scored.logprob, _bytes_of(text))


def chat_logprobs(decoder: TokenDecoder, tokens: Sequence[OutToken]) -> ChatLogprobs | None:
    """`choices[].logprobs` of a chat completion; None if the request asked for none."""
    if all(token.logprob is None for token in tokens):
        return None
    return ChatLogprobs(logprob_entries(decoder, tokens))


def logprob_entries(decoder: TokenDecoder, tokens: Sequence[OutToken]) -> list[ChatTokenLogprob]:
    content: list[ChatTokenLogprob] = []
    for token in tokens:
        if token.logprob is None or token.is_stop:
            continue
        text = token_text(decoder, token.token_id)
        top = [_top_logprob(decoder, each) for each in token.top]
        content.append(ChatTokenLogprob(text, token.logprob, _bytes_of(text), top))
    return content


class CompletionLogprobsBuilder:
    """Builds `choices[].logprobs` of a text completion, whose text offsets count over the whole text. A stop token is
    included, as it is in the usage, although it has no text in the answer."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._offset = 0
        self._next = _empty()

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

    def take(self) -> CompletionLogprobs | None:
        """The tokens pushed since the last call; None if there are none."""
        if not self._next.tokens:
            return None
        taken, self._next = self._next, _empty()
        return taken

    def _push(self, text: str, logprob: float | None, top: dict[str, float | None] | None) -> None:
        self._next.tokens.append(text)
        self._next.token_logprobs.append(logprob)
        self._next.top_logprobs.append(top)
        self._next.text_offset.append(self._offset)
        self._offset += len(text)

    def _top(self, token: str, logprob: float, top: Iterable[_Scored]) -> dict[str, float | None]:
        """The most likely tokens and the token itself. If several have the same text, the most likely one counts."""
        found: dict[str, float | None] = {}
        for each in top:
            found.setdefault(token_text(self._decoder, each.token_id), each.logprob)
        found.setdefault(token, logprob)
        return found


def _empty() -> CompletionLogprobs:
    return CompletionLogprobs([], [], [], [])
