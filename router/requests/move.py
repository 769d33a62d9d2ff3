"""A decoding request moves from one decode worker to another, without a prefill and with hardly a pause. Pure.

    Hold → S ── HoldAnswered ── Reserve → T ── Reserved ── Push → S, Join → T ── joined: T decodes
                 │                 │                        │
                 └─── no ──────────┴─── T refused, failed ──┴── Resume → S: it goes on where it was

T reserves for the prompt and the answer so far, without the answer's last token: the KV of that token is not computed
yet, and T joins with it. S sends nothing while it holds, so the router has the whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.prefix_index.mirror import WorkerKey


class MovePhase(StrEnum):
    HOLDING = "holding"
    RESERVING = "reserving"
    PUSHING = "pushing"


@dataclass(slots=True)
class Move:
    """`source_id`, `target_id`: the request's wire id at either worker."""

    source: WorkerKey
    target: WorkerKey
    source_id: str
    target_id: str
    phase: MovePhase = MovePhase.HOLDING
