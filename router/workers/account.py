"""What this router gave a worker, and which part of that the worker's last report of its load cannot know of yet.

The load of a worker that serves several routers is what it says itself. Frames are counted on both sides, and the
worker says with every frame how many it has taken up; what went out later, or has not gone out yet, is added to its
report.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Charge:
    """What one request is expected to cost one worker. `frame`: the number of the frame that took it there."""

    prefill_tokens: int  # to compute; 0 from the first token on
    blocks: int
    frame: int | None = None


@dataclass(slots=True)
class Account:
    """`requests` and `prefill_tokens`: all that is ours; `unreported_...`: what is missing in the worker's report."""

    requests: int = 0
    prefill_tokens: int = 0
    unreported_requests: int = 0
    unreported_tokens: int = 0
    unreported_blocks: int = 0
    _unreported: set[Charge] = field(default_factory=set)
    _seen_frames: int = field(default=0, compare=False)

    def add(self, charge: Charge) -> None:
        self.requests += 1
        self.prefill_tokens += charge.prefill_tokens
        self.unreported_requests += 1
        self.unreported_tokens += charge.prefill_tokens
        self.unreported_blocks += charge.blocks
        self._unreported.add(charge)

    def prefilled(self, charge: Charge) -> None:
        """Its prompt is computed, whatever the report says."""
        self.prefill_tokens -= charge.prefill_tokens
        if charge in self._unreported:
            self.unreported_tokens -= charge.prefill_tokens
        charge.prefill_tokens = 0

    def remove(self, charge: Charge) -> None:
        self.requests -= 1
        self.prefill_tokens -= charge.prefill_tokens
        self._reported(charge)

    def acknowledge(self, frames: int) -> None:
        """The worker's report knows of the session's first `frames` frames."""
        if frames == self._seen_frames:  # asked for every decision; what was sent since has a higher number
            return
        self._seen_frames = frames
        for charge in [each for each in self._unreported if each.frame is not None and each.frame <= frames]:
            self._reported(charge)

    def _reported(self, charge: Charge) -> None:
        if charge in self._unreported:
            self._unreported.discard(charge)
            self.unreported_requests -= 1
            self.unreported_tokens -= charge.prefill_tokens
            self.unreported_blocks -= charge.blocks
