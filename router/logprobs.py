"""OpenAI's two logprobs formats, from our tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.detokenizer import Decoder
from router.output import OutToken

Json = dict[str, object]


def token_text(decoder: Decoder, token_id: int) -> str:
    return decoder.decode([token_id], skip_special_tokens=False)


def _entry(decoder: Decoder, token_id: int, logprob: float) -> Json:
    text = token_text(decoder, token_id)
    # A token that is a part of a character has no text of its own; U+FFFD stands for it, and bytes are unknown.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def chat_logprobs(decoder: Decoder, tokens: Sequence[OutToken]) -> Json | None:
    """`choices[].logprobs` of a chat completion; None when none were asked for."""
    content: list[Json] = []
    for token in tokens:
        if token.logprob is None or token.is_stop:
            continue
        entry = _entry(decoder, token.token_id, token.logprob)
        entry["top_logprobs"] = [_entry(decoder, top.token_id, top.logprob) for top in token.top]
        content.append(entry)
    if not content and all(token.logprob is None for token in tokens):
        return None
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, which counts text offsets over the whole answer."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._offset = 0

    def take(self, tokens: Sequence[OutToken]) -> Json | None:
        """The next tokens' part; None when no logprobs were asked for."""
        shown = [token for token in tokens if token.logprob is not None and not token.is_stop]
        if not shown:
            return None
        texts, offsets = [], []
        for token in shown:
            text = token_text(self._decoder, token.token_id)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
        tops: list[dict[str, float]] = []
        for token in shown:
            tops.append({token_text(self._decoder, top.token_id): top.logprob for top in token.top})
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in shown],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
