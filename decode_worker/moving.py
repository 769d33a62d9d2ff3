"""Requests that decode here and go on elsewhere: held, pushed to another decode worker, forgotten. Or they go on here.

    decoding ──hold──▶ HELD ──move──▶ PUSHED ──every block acknowledged──▶ (over here)
        ▲               │               │
        └──── resume ───┴─── failed ────┘

The same sessions carry it as carry a prompt's blocks; only its blocks are all there from the start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtransfer.causes import HandoffCause
from kvtransfer.control import CloseSend, FromAgent, OpenSend, SendClosed, SendFailed, Sent
from kvtransfer.session.ticket import ticket_id_of
from tandem.clock import Clock
from tandem.engine.api import RequestEnd
from tandem.engine.engine import Engine
from tandem.errors import TandemError
from tandem.request import RequestState
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.identity import WorkerIdentity
from worker.outgoing import Outgoing, OutgoingBook, Phase
from worker.requests import RequestBook
from worker.send_report import handoff_done

log = logging.getLogger(__name__)


class MovingRole:
    """Owns a request from hold on, until it is over here or goes on here.

    A request that neither moves nor goes on within `ticket_ttl_s` goes on: its router forgot it.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        agents: Agents,
        requests: RequestBook,
        clock: Clock,
        ticket_ttl_s: float,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._agents = agents
        self._requests = requests
        self._clock = clock
        self._ttl_s = ticket_ttl_s
        self._outgoing = OutgoingBook(identity.tp)
        self._held_since_s: dict[str, float] = {}  # by engine id
        self._ending: set[str] = set()  # engine ids whose blocks go when the agents have let go of them

    # --- routers -----------------------------------------------------------------------------------------------

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "hold":
                self._hold(session, frame.hold.request_id)
            case "move":
                if engine_id := self._held(session, frame.move.request_id):
                    self._move(engine_id, frame.move.ticket)
            case "resume":
                if engine_id := self._held(session, frame.resume.request_id):
                    self._go_on(engine_id)

    def owns(self, engine_id: str) -> bool:
        return engine_id in self._held_since_s or engine_id in self._ending

    def cancel(self, engine_id: str, error: TandemError) -> None:
        self._requests.fail(engine_id, error)
        self._over(engine_id)

    def _held(self, session: int, request_id: str) -> str | None:
        engine_id = self._requests.find(session, request_id)
        return engine_id if engine_id in self._held_since_s else None

    def _hold(self, session: int, request_id: str) -> None:
        engine_id = self._requests.find(session, request_id)
        # An earlier move of it may still have readers of its blocks.
        free = engine_id is not None and self._outgoing.by_engine_id(engine_id) is None
        held = engine_id is not None and free and self._engine.hold(engine_id)
        if held and engine_id is not None:
            self._held_since_s[engine_id] = self._clock.now_s()
        self._requests.outbox.frame(session).held.add(request_id=request_id, held=held)

    def _move(self, engine_id: str, ticket: worker_pb2.HandoffTicket) -> None:
        if self._outgoing.by_engine_id(engine_id) is not None:
            return  # it is on its way already
        first_block = ticket.cached_tokens // self._identity.block_tokens
        try:
            self._agents.require_all()
            ticket_id = ticket_id_of(ticket.signed)
            tokens = self._engine.export_held(engine_id, first_block)
        except TandemError as error:
            log.warning("a request cannot be moved: %s", error.message)
            self._go_on(engine_id)
            return
        if first_block * self._identity.block_tokens >= tokens:
            self._moved(engine_id)  # the other side has every block
            return
        self._outgoing.open(ticket_id, engine_id, self._clock.now_s())
        self._agents.broadcast(
            OpenSend(
                ticket_id=ticket_id,
                signed_ticket=ticket.signed,
                export_id=engine_id,
                decode_worker=ticket.decode_worker,
                decode_epoch=ticket.decode_epoch,
                first_block=first_block,
                prompt_tokens=tokens,
            )
        )

    # --- transfer agents ---------------------------------------------------------------------------------------

    def on_agent(self, rank: int, message: FromAgent) -> None:
        match message:
            case Sent():
                if entry := self._outgoing.sent(rank, message):
                    self._acknowledged(entry)
            case SendFailed(ticket_id=ticket_id, cause=cause, message=text):
                if entry := self._outgoing.by_ticket(ticket_id):
                    self._failed(entry, f"{cause}: {text}")
            case SendClosed(ticket_id=ticket_id):
                self._closed(rank, ticket_id)
            case _:
                pass  # other tickets' messages, attachment and link reports

    def on_agent_lost(self, rank: int) -> None:
        for entry in self._outgoing.open_entries():
            if entry.phase is Phase.SENDING and rank in entry.pending:
                self._failed(entry, HandoffCause.PEER_LOST.value)
            self._closed(rank, entry.ticket_id)

    def _acknowledged(self, entry: Outgoing) -> None:
        if target := self._requests.frame_of(entry.engine_id):
            frame, request_id = target
            frame.handoffs.append(handoff_done(request_id, entry))
        self._moved(entry.engine_id)

    def _failed(self, entry: Outgoing, why: str) -> None:
        log.warning("the blocks of a request that was to move were not taken: %s", why)
        if entry.engine_id in self._held_since_s:
            self._go_on(entry.engine_id)
        else:
            self._stop_sending(entry)

    # --- ends --------------------------------------------------------------------------------------------------

    def _moved(self, engine_id: str) -> None:
        self._requests.close(engine_id, RequestState.FINISHED)
        self._over(engine_id)

    def _go_on(self, engine_id: str) -> None:
        """What is computed does not change, so whoever still reads a block of it reads nothing wrong."""
        del self._held_since_s[engine_id]
        self._engine.resume(engine_id)
        if (entry := self._outgoing.by_engine_id(engine_id)) is not None:
            self._stop_sending(entry)
        if target := self._requests.frame_of(engine_id):
            frame, request_id = target
            frame.held.add(request_id=request_id, held=False)

    def _over(self, engine_id: str) -> None:
        """Its blocks go as soon as nobody can read them any more."""
        self._held_since_s.pop(engine_id, None)
        if (entry := self._outgoing.by_engine_id(engine_id)) is None:
            self._engine.cancel(engine_id)
            return
        self._ending.add(engine_id)
        self._stop_sending(entry)

    def _stop_sending(self, entry: Outgoing) -> None:
        if self._outgoing.start_closing(entry):
            self._agents.broadcast(CloseSend(ticket_id=entry.ticket_id))
            for rank in self._agents.lost_ranks():
                self._closed(rank, entry.ticket_id)

    def _closed(self, rank: int, ticket_id: str) -> None:
        if (entry := self._outgoing.closed(rank, ticket_id)) and entry.engine_id in self._ending:
            self._ending.discard(entry.engine_id)
            self._engine.cancel(entry.engine_id)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        """Held requests are in no step."""

    def tick(self) -> None:
        late_s = self._clock.now_s() - self._ttl_s
        for engine_id in [each for each, since_s in self._held_since_s.items() if since_s < late_s]:
            if self._outgoing.by_engine_id(engine_id) is None:  # else its agents have a deadline of their own
                self._go_on(engine_id)
