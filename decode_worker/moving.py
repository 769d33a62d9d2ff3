"""The source of a move: requests that decode here are held, pushed to another decode worker and dropped, or resumed.

    decoding ──hold──▶ HELD ──move──▶ PUSHED ──every block acknowledged──▶ dropped here
        ▲               │               │
        └──── resume ───┴─── failed ────┘

A move uses the same transfer sessions as a prefill's handoff; only here all blocks exist from the start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtransfer.causes import HandoffFault
from kvtransfer.session.ticket import ticket_id_of
from tandem.clock import Clock
from tandem.engine.api import Engine, RequestEnd
from tandem.errors import TandemError, UnavailableError
from tandem.request import RequestState
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.outbound_handoffs import OutboundHandoff, SendingRole
from worker.requests import RequestBook
from worker.roles import WorkerIdentity

log = logging.getLogger(__name__)


class MovingRole(SendingRole):
    """Owns a request from its hold until it is dropped or resumed.

    A request that is neither moved nor resumed within `ticket_ttl_s` is resumed: its router has lost track of it.
    """

    SENDER = "decode"

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        agents: Agents,
        requests: RequestBook,
        clock: Clock,
        ticket_ttl_s: float,
    ) -> None:
        super().__init__(identity, engine, agents, requests, clock)
        self._ttl_s = ticket_ttl_s
        self._held_since_s: dict[str, float] = {}  # by engine id
        self._ending: set[str] = set()  # engine ids whose blocks are freed once the agents have closed

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
                    self._resume(engine_id)

    def owns(self, engine_id: str) -> bool:
        return engine_id in self._held_since_s or engine_id in self._ending

    def cancel(self, engine_id: str, error: TandemError) -> None:
        self._requests.fail(engine_id, error)
        self._drop(engine_id)

    def _find(self, session: int, request_id: str) -> str | None:
        """None: it was dropped once it was sent, and its target failed after that: the router starts it again. If it
        has ended, the router has heard of that before."""
        if (engine_id := self._requests.find(session, request_id)) is None:
            self._requests.refuse(
                session, request_id, UnavailableError("the request was moved and is not here any more")
            )
        return engine_id

    def _held(self, session: int, request_id: str) -> str | None:
        engine_id = self._find(session, request_id)
        return engine_id if engine_id in self._held_since_s else None

    def _hold(self, session: int, request_id: str) -> None:
        if (engine_id := self._find(session, request_id)) is None:
            return
        # Agents of an earlier move may still read its blocks.
        held = self._handoffs.by_engine_id(engine_id) is None and self._engine.hold(engine_id)
        if held:
            self._held_since_s[engine_id] = self._clock.now_s()
        self._requests.outbox.frame(session).held.add(request_id=request_id, held=held)

    def _move(self, engine_id: str, ticket: worker_pb2.HandoffTicket) -> None:
        if self._handoffs.by_engine_id(engine_id) is not None:
            return  # its blocks are already being sent
        first_block = ticket.cached_tokens // self._identity.block_tokens
        try:
            self._agents.require_all()
            ticket_id = ticket_id_of(ticket.signed)
            tokens = self._engine.export_held(engine_id, first_block)
        except TandemError as error:
            log.warning("cannot move a request: %s", error.message)
            self._resume(engine_id)
            return
        if first_block * self._identity.block_tokens >= tokens:
            self._all_sent(engine_id)  # the receiver has every block
            return
        self._start_sending(
            engine_id,
            ticket_id,
            ticket,
            first_block=first_block,
            prompt_tokens=tokens,
            taken_up_at_s=self._clock.now_s(),
        )

    # --- transfer agents ---------------------------------------------------------------------------------------

    def _all_sent(self, engine_id: str) -> None:
        self._requests.close(engine_id, RequestState.FINISHED)
        self._drop(engine_id)

    def _not_sent(self, entry: OutboundHandoff, fault: HandoffFault) -> None:
        log.warning("a request was not moved: %s", fault.message)
        if entry.engine_id in self._held_since_s:
            self._resume(entry.engine_id)
        else:
            self._stop_sending(entry)

    def _all_closed(self, engine_id: str) -> None:
        if engine_id in self._ending:
            self._ending.discard(engine_id)
            self._engine.cancel(engine_id)

    # --- ends --------------------------------------------------------------------------------------------------

    def _resume(self, engine_id: str) -> None:
        """Safe while agents still read the blocks: computed KV does not change."""
        del self._held_since_s[engine_id]
        self._engine.resume(engine_id)
        if (entry := self._handoffs.by_engine_id(engine_id)) is not None:
            self._stop_sending(entry)
        if target := self._requests.frame_of(engine_id):
            frame, request_id = target
            frame.held.add(request_id=request_id, held=False)

    def _drop(self, engine_id: str) -> None:
        """Frees the blocks as soon as no agent can read them any more."""
        self._held_since_s.pop(engine_id, None)
        if (entry := self._handoffs.by_engine_id(engine_id)) is None:
            self._engine.cancel(engine_id)
            return
        self._ending.add(engine_id)
        self._stop_sending(entry)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        """Held requests take part in no step."""

    def tick(self) -> None:
        late_s = self._clock.now_s() - self._ttl_s
        for engine_id in [each for each, since_s in self._held_since_s.items() if since_s < late_s]:
            if self._handoffs.by_engine_id(engine_id) is None:  # else its agents keep the deadline
                self._resume(engine_id)
