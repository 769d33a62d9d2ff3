"""How many prompt tokens a step may have while answers go on, so that it takes at most a given time.

A pure rule: the times come from the engine. It needs no model of a step's cost: the limit follows the last times, as a
controller does. A step that took too long lowers it in proportion, at most to half, because a shared machine has slow
moments. One that used all of it and was clearly in time raises it: little after a late step, so that few are late where
their times vary, and a lot at the start and when several in a row took less than half of the time.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

LEAST_TOKENS: Final = 16  # a prompt is never cut smaller, so it always goes on
_FIRST_TOKENS: Final = 32  # before any step is known
_USED: Final = 0.9  # a step with this part of the limit shows what the limit takes
_AIM: Final = 0.95  # of the longest time
_FAST_RISE, _RISE, _FALL = 2.0, 1.05, 0.5  # by one step, at most
_QUICK_STEPS: Final = 4  # that took less than half of the time, before the rise is fast again


class PromptLimit:
    """Args: `longest_s` of a step; `most_tokens`: the budget of a step."""

    def __init__(self, longest_s: float, most_tokens: int) -> None:
        self._longest_s = longest_s
        self._most = most_tokens
        self._tokens = float(min(_FIRST_TOKENS, most_tokens))
        self._rise = _FAST_RISE
        self._quick = 0  # steps in a row

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        """Of a step with prompts and answers."""
        fits = self._longest_s / seconds
        if fits < 1:
            self._rise, self._quick = _RISE, 0
            self._tokens = max(min(self._tokens, prompt_tokens * fits), self._tokens * _FALL, LEAST_TOKENS)
        elif prompt_tokens >= _USED * int(self._tokens):
            self._quick = self._quick + 1 if fits > 2 else 0
            if self._quick >= _QUICK_STEPS:
                self._rise = _FAST_RISE
            rise = min(sqrt(_AIM * fits), self._rise)
            self._tokens = min(self._tokens * max(rise, 1.0), self._most)  # not of the whole number, which would stay
