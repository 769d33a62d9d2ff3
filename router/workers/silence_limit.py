"""When a worker last showed progress of its step loop, and how long it may be silent (`router.worker_stall_s`).
Pure."""

from __future__ import annotations

FIRST_GUESS_S_PER_TOKEN = 0.001  # until the worker has computed a prompt
SAFETY = 2.0  # a chunk may take this many times the measured time
MOST_S_PER_TOKEN = 1.0
STEP_TOKENS = 1024  # at most this many are computed between two reports, because a step ends with its chunk


class Progress:
    """Fed by the link to one worker. Times are the router's monotonic seconds.

    Older workers report no step count and no load between steps; their silence is not measured.
    """

    def __init__(self) -> None:
        self._at_s = 0.0
        self._computing_at_s = 0.0
        # When a step or an answer was reported: an idle worker's first request is none.
        self.stepped_at_s: float | None = None
        self._steps: int | None = None
        self._waiting_tokens = 0
        self._s_per_token = FIRST_GUESS_S_PER_TOKEN

    def work_started(self, now_s: float) -> None:
        """An idle worker got a request."""
        self._at_s = now_s

    def request_event(self, now_s: float) -> None:
        """A frame about a request came: a token, a ticket, a handoff or an end."""
        self._at_s = self.stepped_at_s = now_s

    def computing(self, now_s: float) -> None:
        """The worker computes a long step. Its time per token is known only at the step's end."""
        self._computing_at_s = now_s

    def load_reported(self, now_s: float, *, steps: int | None, has_work: bool, waiting_tokens: int) -> None:
        """A load report came. It shows progress if the step count changed or the engine has no work."""
        if not has_work or steps is None or steps != self._steps:
            computed = min(self._waiting_tokens - waiting_tokens, STEP_TOKENS)
            if computed > 0:
                s_per_token = min(max(now_s - self._at_s, 0.0) / computed, MOST_S_PER_TOKEN)
                self._s_per_token += (s_per_token - self._s_per_token) / 2
            self._at_s = self.stepped_at_s = now_s
        self._steps, self._waiting_tokens = steps, waiting_tokens

    def excuse(self, pause_s: float) -> None:
        """Excludes a pause of the router itself from the silence."""
        self._at_s += pause_s
        self._computing_at_s += pause_s

    def silent_s(self, now_s: float) -> float | None:
        """Time without progress; None if the worker does not report its steps."""
        return None if self._steps is None else max(0.0, now_s - max(self._at_s, self._computing_at_s))

    def limit_s(self, stall_s: float, prefill_tokens: int) -> float:
        """The longest allowed silence with `prefill_tokens` to compute, at the measured time per token."""
        tokens = min(max(prefill_tokens, self._waiting_tokens), STEP_TOKENS)
        return stall_s + tokens * SAFETY * self._s_per_token
