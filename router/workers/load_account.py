"""The load that this router put on a worker, and the part that the worker's last load report does not include yet.

Several routers share a worker, so its load is what it reports. Router and worker both count frames, and each worker
frame carries the number of router frames it has handled. The router adds the charges of later frames, and of frames not
sent yet, to the report.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Charge:
    """The expected cost of one request on one worker. `frame`: number of the frame that carried it; None: not sent."""

    prefill_tokens: int  # to compute; 0 from the first token on
    blocks: int
    frame: int | None = None


@dataclass(slots=True)
class Account:
    """`requests` and `prefill_tokens`: totals of this router; `unreported_...`: not yet in the worker's report."""

    requests: int = 0
    prefill_tokens: int = 0
    unreported_requests: int = 0
    unreported_tokens: int = 0
    unreported_blocks: int = 0
    _charges: set[Charge] = field(default_factory=set)
    _unreported: set[Charge] = field(default_factory=set)
    _seen_frames: int = field(default=0, compare=False)

    def add(self, charge: Charge) -> None:
        self._charges.add(charge)
        self.requests += 1
        self.prefill_tokens += charge.prefill_tokens
        self.unreported_requests += 1
        self.unreported_tokens += charge.prefill_tokens
        self.unreported_blocks += charge.blocks
        self._unreported.add(charge)

    def prefilled(self, charge: Charge) -> None:
        """The prompt of a charge is computed, even if the worker's report still counts it."""
        if charge not in self._charges:
            return
        self.prefill_tokens -= charge.prefill_tokens
        if charge in self._unreported:
            self.unreported_tokens -= charge.prefill_tokens
        charge.prefill_tokens = 0

    def remove(self, charge: Charge) -> None:
        """Ignores a charge of an earlier listing of the worker: its account was another."""
        if charge not in self._charges:
            return
        self._charges.discard(charge)
        self.requests -= 1
        self.prefill_tokens -= charge.prefill_tokens
        self._reported(charge)

    def acknowledge(self, frames: int) -> None:
        """The worker's report includes the session's first `frames` frames."""
        if frames == self._seen_frames:  # called for every decision; later frames have higher numbers
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
