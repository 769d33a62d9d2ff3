"""The way of a request that decodes from one decode worker to another, without a prefill and with hardly a pause.

    Hold → S ── Held ── Reserve → T ── Reserved ── Move → S, Join → T ── joined: T decodes
                 │          │                         │
                 └── no ────┴── T refused, failed ────┴── Resume → S: it goes on where it was

Prompt and answer so far are what T reserves for, without the answer's last token: its KV is not computed yet, and it is
the token that T joins with. S sends nothing while it holds, so the router knows exactly what the answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.fleet import Worker
    from router.request import ValidRequest
    from router.worker_client import WorkerLink


class MovePhase(StrEnum):
    HOLDING = "holding"
    RESERVING = "reserving"
    PUSHING = "pushing"


@dataclass(slots=True)
class Move:
    """`source_id`, `target_id`: the request's name on either worker's wire."""

    request: ValidRequest
    source: Worker
    target: Worker
    source_id: str
    target_id: str
    phase: MovePhase = MovePhase.HOLDING

    def begin(self) -> None:
        hold = worker_pb2.Hold(request_id=self.source_id)
        self.source.link.send(worker_pb2.RouterFrame(hold=hold))

    def reserve(self, answer: Sequence[int]) -> None:
        """The source holds it after `answer`."""
        self.phase = MovePhase.RESERVING
        reserve = worker_pb2.Reserve(
            work=self.request.work(self.target_id, answer[:-1]),
            prefill_worker=self.source.key.worker_id,
            prefill_epoch=self.source.key.epoch,
            use_prefix_cache=True,
        )
        self.target.link.send(worker_pb2.RouterFrame(reserve=reserve))

    def push(self, ticket: worker_pb2.HandoffTicket, last_token: int) -> None:
        self.phase = MovePhase.PUSHING
        move = worker_pb2.Move(request_id=self.source_id, ticket=ticket)
        self.source.link.send(worker_pb2.RouterFrame(move=move))
        join = worker_pb2.Join(request_id=self.target_id, first_token=last_token)
        self.target.link.send(worker_pb2.RouterFrame(join=join))

    def resume(self) -> None:
        resume = worker_pb2.Resume(request_id=self.source_id)
        self.source.link.send(worker_pb2.RouterFrame(resume=resume))

    def is_from(self, link: WorkerLink) -> bool:
        return self.source.link is link

    def is_to(self, link: WorkerLink) -> bool:
        return self.target.link is link
