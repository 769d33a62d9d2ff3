"""How many prompt tokens a step may have while answers go on, so that it takes at most a given time.

A pure rule: the times come from the engine. It needs no model of a step's cost: the limit follows the last times, as a
controller does. A step that took too long lowers it in proportion; one that used all of it and took less raises it, by
the root of the proportion and at most to twice. So it stays near what the time allows while contexts, batches and other
load on the machine change.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

LEAST_TOKENS: Final = 16  # a prompt is never cut smaller, so it always goes on
_FIRST_TOKENS: Final = 128  # before any step is known
_USED: Final = 0.9  # a step with this part of the limit shows what the limit takes


class PromptLimit:
    """Args: `longest_s` of a step; `most_tokens`: the budget of a step."""

    def __init__(self, longest_s: float, most_tokens: int) -> None:
        self._longest_s = longest_s
        self._most = most_tokens
        self._tokens = float(min(_FIRST_TOKENS, most_tokens))

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        """Of a step with prompts and answers."""
        fits = self._longest_s / seconds
        if fits < 1:
            self._tokens = max(min(self._tokens, prompt_tokens * fits), LEAST_TOKENS)
        elif prompt_tokens >= _USED * int(self._tokens):
            self._tokens = min(max(self._tokens, prompt_tokens * min(sqrt(fits), 2.0)), self._most)
