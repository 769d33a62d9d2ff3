"""The way of a request that decodes from one decode worker to another, without a prefill and with hardly a pause.

    Hold → S ── Held ── Reserve → T ── Reserved ── Move → S, Join → T ── joined: T decodes
                 │          │                         │
                 └── no ────┴── T refused, failed ────┴── Resume → S: it goes on where it was

Prompt and answer so far are what T reserves for, without the answer's last token: its KV is not computed yet, and it is
the token that T joins with. S sends nothing while it holds, so the router knows exactly what the answer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from router.requests import frames
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.requests.run import RequestRun
    from router.requests.run_host import RunHost
    from router.requests.wire_names import WireNames
    from router.workers.fleet import Worker
    from router.workers.link import WorkerLink


class MovePhase(StrEnum):
    HOLDING = "holding"
    RESERVING = "reserving"
    PUSHING = "pushing"


@dataclass(slots=True)
class Move:
    """`source_id`, `target_id`: the request's name on either worker's wire."""

    run: RequestRun
    source: Worker
    target: Worker
    source_id: str
    target_id: str
    phase: MovePhase = MovePhase.HOLDING

    def begin(self) -> None:
        frames.hold(self.source, self.source_id)

    def reserve(self) -> None:
        """The source holds it after the answer so far."""
        self.phase = MovePhase.RESERVING
        frames.reserve(self.target, self.run.request.work(self.target_id, self.run.answer[:-1]), self.source)

    def push(self, ticket: worker_pb2.HandoffTicket) -> None:
        self.phase = MovePhase.PUSHING
        frames.move(self.source, self.source_id, ticket)
        frames.join(self.target, self.target_id, self.run.answer[-1])

    def resume(self) -> None:
        frames.resume(self.source, self.source_id)

    def is_from(self, link: WorkerLink) -> bool:
        return self.source.link is link

    def is_to(self, link: WorkerLink) -> bool:
        return self.target.link is link


class Mover:
    """One run's moves, one at a time. Words of workers that belong to a move are taken here first."""

    def __init__(self, names: WireNames, host: RunHost) -> None:
        self._names = names
        self._host = host
        self._move: Move | None = None

    @property
    def is_moving(self) -> bool:
        return self._move is not None

    def begin(self, move: Move) -> None:
        self._move = move
        move.begin()

    def forget(self) -> None:
        self._move = None

    def on_held(self, link: WorkerLink, held: worker_pb2.Held) -> None:
        move = self._move
        if move is None or not move.is_from(link):
            return
        if not held.held:  # it goes on there, for whatever reason
            self._give_up(move)
        elif move.phase is MovePhase.HOLDING:
            if not move.target.link.ready:
                move.resume()
                self._give_up(move)
                return
            self._names.attach(move.target, move.target_id, move.run)
            move.reserve()
            self._host.sent(move.run, move.target)

    def on_reserved(self, link: WorkerLink, reserved: worker_pb2.Reserved) -> None:
        move = self._move
        if move is not None and move.is_to(link) and move.phase is MovePhase.RESERVING:
            move.push(reserved.ticket)

    def on_handoff(self, link: WorkerLink) -> Move | None:
        """The move that is done by that: the target has joined."""
        move = self._move
        if move is None or not move.is_to(link):
            return None
        self._move = None
        self._names.detach(move.source.link)
        return move

    def on_target_gone(self, link: WorkerLink) -> bool:
        """Whether it was the target that refused, failed or was lost: the request goes on where it was."""
        move = self._move
        if move is None or not move.is_to(link):
            return False
        move.resume()
        self._give_up(move)
        return True

    def _give_up(self, move: Move) -> None:
        self._move = None
        self._names.cancel(move.target)
        self._host.move_failed(move.run, move.target)
