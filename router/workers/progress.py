"""When a worker last showed that its step loop goes on, and how long it may be silent. Pure."""

from __future__ import annotations

FIRST_GUESS_S_PER_TOKEN = 0.001  # of a worker that has not computed a prompt yet
SAFETY = 2.0  # a chunk may take so many times what tokens took before
MOST_S_PER_TOKEN = 1.0
STEP_TOKENS = 1024  # more than this is not computed between two reports: a step ends, whatever is still waiting


class Progress:
    """Fed by the link to one worker. Times are the router's monotonic seconds.

    A worker that never said how many steps it did (an older one) does not report in between either, and is not judged.
    """

    def __init__(self) -> None:
        self._at_s = 0.0
        self._steps: int | None = None
        self._waiting_tokens = 0
        self._s_per_token = FIRST_GUESS_S_PER_TOKEN

    def work_started(self, now_s: float) -> None:
        """An idle worker was given something to do."""
        self._at_s = now_s

    def request_event(self, now_s: float) -> None:
        """It said something about a request: a token, a ticket, a handoff, an end."""
        self._at_s = now_s

    def load_reported(self, now_s: float, *, steps: int | None, has_work: bool, waiting_tokens: int) -> None:
        """Its load. A report without a step since the last one shows nothing while there is work for the engine."""
        if not has_work or steps is None or steps != self._steps:
            computed = min(self._waiting_tokens - waiting_tokens, STEP_TOKENS)
            if computed > 0:
                s_per_token = min(max(now_s - self._at_s, 0.0) / computed, MOST_S_PER_TOKEN)
                self._s_per_token += (s_per_token - self._s_per_token) / 2
            self._at_s = now_s
        self._steps, self._waiting_tokens = steps, waiting_tokens

    def excuse(self, pause_s: float) -> None:
        """The router itself did not look for so long."""
        self._at_s += pause_s

    def silent_s(self, now_s: float) -> float | None:
        """How long it has shown nothing; None: it does not report its steps."""
        return None if self._steps is None else max(0.0, now_s - self._at_s)

    def limit_s(self, stall_s: float, prefill_tokens: int) -> float:
        """How long it may be silent with so many prompt tokens to compute: chunks take what chunks took before."""
        tokens = min(max(prefill_tokens, self._waiting_tokens), STEP_TOKENS)
        return stall_s + tokens * SAFETY * self._s_per_token
