"""Who this life of this worker is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One epoch. `ticket_key` signs this epoch's tickets and is known to its own agents alone."""

    worker_id: str
    epoch: int
    tp: int
    model_fingerprint: str
    block_tokens: int
    ticket_key: bytes = field(repr=False)
