"""OpenAI's two formats of logprobs, built from the router's tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Protocol

from msgspec import structs

from router.edge.json_slices import ListMaker, at_once, joined, kept, on_demand
from router.edge.openai.answer_schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from router.requests.output import OutToken
from router.texts.detokenizer import TokenDecoder
from tandem.v1 import inference_pb2


class _Scored(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...


class _ScoredToken(Protocol):
    """`logprob` None: of the first token of a prompt."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> Iterable[_Scored]: ...


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    return decoder.fixed_text(token_id) or decoder.decode([token_id], skip_special_tokens=False)


def _bytes_of(text: str) -> list[int] | None:
    """None for a token that is part of a character: its text is U+FFFD, and its bytes are unknown."""
    return None if "\ufffd" in text else list(text.encode())


def _top_logprob(decoder: TokenDecoder, scored: _Scored) -> TopLogprob:
    text = token_text(decoder, scored.token_id)
    return TopLogprob(text, scored.logprob, _bytes_of(text))


def chat_logprobs(
    decoder: TokenDecoder, tokens: Sequence[OutToken], listed: ListMaker = at_once
) -> ChatLogprobs | None:
    """`choices[].logprobs` of a chat completion; None if the request asked for none."""
    if all(token.logprob is None for token in tokens):
        return None
    return ChatLogprobs(logprob_entries(decoder, tokens, listed))


def logprob_entries(
    decoder: TokenDecoder, tokens: Sequence[OutToken], listed: ListMaker = at_once
) -> list[ChatTokenLogprob]:
    scored = [token for token in tokens if token.logprob is not None and not token.is_stop]
    return listed(partial(_chat_entry, decoder), scored)


def _chat_entry(decoder: TokenDecoder, token: OutToken) -> ChatTokenLogprob:
    text = token_text(decoder, token.token_id)
    return ChatTokenLogprob(text, token.logprob, _bytes_of(text), [_top_logprob(decoder, each) for each in token.top])


class CompletionLogprobsBuilder:
    """Builds `choices[].logprobs` of a text completion, whose text offsets count over the whole text. A stop token is
    included, as it is in the usage, although it has no text in the answer."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._chars = 0
        self._prompt: PromptLogprobs | None = None

    @property
    def chars(self) -> int:
        """Of all tokens whose text offsets were made."""
        return self._chars + (0 if self._prompt is None else self._prompt.chars)

    def build(self, tokens: Sequence[_ScoredToken], listed: ListMaker = at_once) -> CompletionLogprobs | None:
        """The next tokens; None if there are none. A list made on demand must be encoded before the next call."""
        return self.lists(tokens, listed) if tokens else None

    def build_after(self, prompt: PromptLogprobs, tokens: Sequence[_ScoredToken]) -> CompletionLogprobs:
        """Made on demand: the prompt, and the first tokens of its answer, of which there may be none."""
        self._prompt = prompt
        lists = zip(structs.astuple(prompt.logprobs), structs.astuple(self.lists(tokens, on_demand)), strict=True)
        return CompletionLogprobs(*starmap(joined, lists))

    def lists(self, tokens: Sequence[_ScoredToken], listed: ListMaker) -> CompletionLogprobs:
        """The next tokens, of which there may be none."""
        return CompletionLogprobs(
            listed(self._text, tokens),
            listed(_logprob, tokens),
            listed(self._top, tokens),
            listed(self._advance, tokens),
        )

    def _text(self, token: _ScoredToken) -> str:
        return token_text(self._decoder, token.token_id)

    def _advance(self, token: _ScoredToken) -> int:
        offset = self.chars
        self._chars += len(self._text(token))
        return offset

    def _top(self, token: _ScoredToken) -> dict[str, float | None] | None:
        """The most likely tokens and the token itself. If several have the same text, the most likely one counts."""
        if token.logprob is None:
            return None
        found: dict[str, float | None] = {}
        for each in token.top:
            found.setdefault(token_text(self._decoder, each.token_id), each.logprob)
        found.setdefault(self._text(token), token.logprob)
        return found


class PromptLogprobs:
    """The logprobs of a prompt, which are the same before all of its answers: their JSON is made once."""

    def __init__(
        self, decoder: TokenDecoder, prompt: Sequence[int], scores: Sequence[inference_pb2.TokenLogprobs]
    ) -> None:
        """`scores`: from the prompt's second token on, as the first has none."""
        self._builder = CompletionLogprobsBuilder(decoder)
        tokens: list[_ScoredToken] = [OutToken(token_id, None, (), False) for token_id in prompt[:1]]
        made = self._builder.lists([*tokens, *scores], on_demand)
        self.logprobs = CompletionLogprobs(*map(kept, structs.astuple(made)))

    @property
    def chars(self) -> int:
        return self._builder.chars


def _logprob(token: _ScoredToken) -> float | None:
    return token.logprob
