"""How fast a pool works off what waits for it. Pure; the caller passes the time."""

from __future__ import annotations

import math

WINDOW_S = 10.0
MIN_OBSERVED_S = 0.1
MIN_OBSERVATIONS = 3


class DrainRate:
    """Prompt tokens per second that reach their first token, measured only while more requests wait: an idle pool's
    pace says nothing of what it could do. Exponentially forgotten over `window_s` of such time."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._observations = 0
        self._since_last_s = 0.0  # of the time that counts
        self._waiting_since_s: float | None = None  # counted up to here; None: nobody waits

    def set_waiting(self, now_s: float, waiting: bool) -> None:
        """Whether requests wait for the pool from now on."""
        self._advance(now_s)
        self._waiting_since_s = now_s if waiting else None

    def first_token(self, tokens: int, now_s: float) -> None:
        """A prompt of `tokens` tokens has its first token."""
        if self._waiting_since_s is None:
            return
        self._advance(now_s)
        # They were computed over all that time: in the mean half of it ago.
        self._tokens += tokens * math.exp(-self._since_last_s / (2 * self._window_s))
        self._since_last_s = 0.0
        self._observations += 1

    def tokens_per_s(self) -> float | None:
        """None until enough was seen."""
        if self._observations < MIN_OBSERVATIONS or self._seconds < MIN_OBSERVED_S:
            return None
        return self._tokens / self._seconds

    def _advance(self, now_s: float) -> None:
        if self._waiting_since_s is None or now_s <= self._waiting_since_s:
            return
        passed_s = now_s - self._waiting_since_s
        kept = math.exp(-passed_s / self._window_s)
        self._tokens *= kept
        self._seconds = self._seconds * kept + self._window_s * (1.0 - kept)
        self._since_last_s += passed_s
        self._waiting_since_s = now_s
