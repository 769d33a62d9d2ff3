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
from router.requests import actions as act
from router.requests import events as ev


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

    def hold(self) -> act.Hold:
        return act.Hold(self.source, self.source_id)

    def reserve(self, answer_tokens: int) -> act.Reserve | None:
        """The source holds, with so many tokens of the answer given out. None: it said so for the second time."""
        if self.phase is not MovePhase.HOLDING:
            return None
        self.phase = MovePhase.RESERVING
        return act.Reserve(self.target, self.target_id, self.source, answer_tokens - 1)

    def push(self, reserved: ev.Reserved, last_token: int) -> tuple[act.Action, ...]:
        """The target has room. Nothing, if another worker said so, or the target for the second time."""
        if reserved.worker != self.target or self.phase is not MovePhase.RESERVING:
            return ()
        self.phase = MovePhase.PUSHING
        return (
            act.Push(self.source, self.source_id, reserved.ticket),
            act.Join(self.target, self.target_id, last_token),
        )

    def resume(self) -> act.Resume:
        """The source goes on with it."""
        return act.Resume(self.source, self.source_id)
