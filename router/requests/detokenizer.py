"""Turns tokens into text as they arrive. Never splits a character or returns the start of a stop string. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PROMPT_TAIL_TOKENS = 5  # context for decoders that treat a text's first token differently (leading spaces)
MAX_PENDING_TOKENS = 8  # a character has at most 4 byte tokens; a longer run that ends in U+FFFD is not UTF-8
_INCOMPLETE = "\ufffd"
_TAIL_TOKENS = 3  # an incomplete character at the end takes at most 3 byte tokens


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def fixed_text(self, token_id: int) -> str | None:
        """Returns the token's text; None if it depends on neighbouring tokens."""
        ...


class Detokenizer:
    """Text of a growing token sequence. If a token's text depends on its neighbours, it decodes a short window with and
    without the token. The difference is the new text."""

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-PROMPT_TAIL_TOKENS:])
        self._shown = len(self._ids)  # tokens whose text was returned
        self._shown_text = self._text(len(self._ids))

    def push(self, token_id: int) -> str:
        """Returns the characters that `token_id` completes; may be empty."""
        if self._shown == len(self._ids) and (fixed := self._decoder.fixed_text(token_id)) is not None:
            self._ids, self._shown, self._shown_text = [token_id], 1, fixed
            return fixed
        self._ids.append(token_id)
        text = self._text(len(self._ids))
        if text.endswith(_INCOMPLETE):
            if len(self._ids) - self._shown < MAX_PENDING_TOKENS:
                return ""
            return self._show_broken(text)
        return self._show(len(self._ids), text)

    def flush(self) -> str:
        """Returns the rest at the end, with U+FFFD for incomplete characters."""
        return self._show(len(self._ids), self._text(len(self._ids)))

    def _show_broken(self, text: str) -> str:
        """Returns the text that later tokens cannot change."""
        for end in range(len(self._ids) - _TAIL_TOKENS, self._shown, -1):
            shorter = self._text(end)
            if text.startswith(shorter):
                return self._show(end, shorter)
        return ""

    def _show(self, end: int, text: str) -> str:
        new = text[len(self._shown_text) :]
        # The tokens just returned become the context of the next.
        self._ids = self._ids[self._shown :] if end > self._shown else self._ids
        self._shown = end - self._shown if end > self._shown else self._shown
        self._shown_text = self._text(self._shown)
        return new

    def _text(self, end: int) -> str:
        return self._decoder.decode(self._ids[:end], skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str
    stopped: bool


class StopStrings:
    """Returns text up to the first stop string, and holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        if not self._stops:
            return StopResult(text, False)
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return StopResult(text[: min(found)], True)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep], False)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
