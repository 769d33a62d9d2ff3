"""The prefill role: compute the prompt, push its blocks as they are finished, sample the first token."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.causes import HandoffCause, HandoffFault, parse_cause
from kvtransfer.control import CloseSend, FromAgent, OpenSend, SendClosed, SendFailed, Sent
from kvtransfer.session.ticket import ticket_id_of
from tandem.clock import Clock
from tandem.engine.api import RequestEnd
from tandem.engine.engine import Engine
from tandem.errors import InputError, TandemError
from tandem.request import RequestState
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.identity import WorkerIdentity
from worker.outgoing import Outgoing, OutgoingBook, Phase
from worker.requests import RequestBook
from worker.send_report import handoff_done
from worker.wire import parse_work


class PrefillRole:
    """A request here is over when its first token is out *and* its blocks are acknowledged; both are tracked apart,
    because the router must not wait for the second."""

    def __init__(
        self, identity: WorkerIdentity, engine: Engine, agents: Agents, requests: RequestBook, clock: Clock
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._agents = agents
        self._requests = requests
        self._clock = clock
        self._outgoing = OutgoingBook(identity.tp)
        self._engine_ids: set[str] = set()  # ours, until their blocks are released
        self._prefilled: set[str] = set()  # those that left the engine and keep leased blocks

    # --- routers -----------------------------------------------------------------------------------------------

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """Raises InputError when the router has a request of that name here already."""
        prefill = frame.prefill
        engine_id = self._requests.open(session, prefill.work.request_id, prefill.work.trace_id)
        self._engine_ids.add(engine_id)
        try:
            self._start(engine_id, prefill)
        except TandemError as error:
            self.cancel(engine_id, error)

    def owns(self, engine_id: str) -> bool:
        return engine_id in self._engine_ids

    def _start(self, engine_id: str, prefill: worker_pb2.Prefill) -> None:
        taken_up_at_s = self._clock.now_s()
        self._agents.require_all()
        ticket = prefill.ticket
        ticket_id = ticket_id_of(ticket.signed)
        if self._outgoing.by_ticket(ticket_id) is not None:
            raise InputError("ticket: expected one that is not in use", field="ticket")
        first_block = ticket.cached_tokens // self._identity.block_tokens
        request = parse_work(
            prefill.work,
            engine_id=engine_id,
            model_fingerprint=self._identity.model_fingerprint,
            export_from_block=first_block,
        )
        self._engine.add(request)
        if first_block * self._identity.block_tokens >= len(request.prompt) or request.sampling.max_tokens == 1:
            return  # the decode worker has every block, or needs none; only the first token is wanted
        self._outgoing.open(ticket_id, engine_id, taken_up_at_s)
        self._agents.broadcast(
            OpenSend(
                ticket_id=ticket_id,
                signed_ticket=ticket.signed,
                export_id=engine_id,
                decode_worker=ticket.decode_worker,
                decode_epoch=ticket.decode_epoch,
                first_block=first_block,
                prompt_tokens=len(request.prompt),
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
                    fault = HandoffFault(parse_cause(cause), f"the KV blocks were not taken ({cause}): {text}")
                    self.cancel(entry.engine_id, fault)
            case SendClosed(ticket_id=ticket_id):
                self._closed(rank, ticket_id)
            case _:
                pass  # attachment and link reports are the agents' own business

    def on_agent_lost(self, rank: int) -> None:
        lost = HandoffFault(HandoffCause.PEER_LOST, "the prefill worker's transfer agent was lost: try again")
        for entry in self._outgoing.open_entries():
            if entry.phase is Phase.SENDING and rank in entry.pending:
                self.cancel(entry.engine_id, lost)
            self._closed(rank, entry.ticket_id)

    def _acknowledged(self, entry: Outgoing) -> None:
        if target := self._requests.frame_of(entry.engine_id):
            frame, request_id = target
            frame.handoffs.append(handoff_done(request_id, entry))
        if entry.engine_id in self._prefilled:
            self._complete(entry.engine_id)

    def _complete(self, engine_id: str) -> None:
        """The first token is out and nothing is left to send."""
        self._requests.close(engine_id, RequestState.FINISHED)
        self._release(engine_id)

    def _closed(self, rank: int, ticket_id: str) -> None:
        if entry := self._outgoing.closed(rank, ticket_id):
            self._release(entry.engine_id)

    def _release(self, engine_id: str) -> None:
        self._engine_ids.discard(engine_id)
        if engine_id in self._prefilled:
            self._prefilled.discard(engine_id)
            self._engine.release_export(engine_id)
        else:
            self._engine.cancel(engine_id)

    # --- ends --------------------------------------------------------------------------------------------------

    def cancel(self, engine_id: str, error: TandemError) -> None:
        """Tells the router at once."""
        self._requests.fail(engine_id, error)
        self._stop_sending(engine_id)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        for end in ended:
            if end.error is not None:
                self.cancel(end.request_id, end.error)
                continue
            self._prefilled.add(end.request_id)
            entry = self._outgoing.by_engine_id(end.request_id)
            if entry is not None:
                entry.first_token_at_s = self._clock.now_s()
            if end.reason is not None:
                # The first token ended the request. The router drops the handoff, at the decode worker: ended from
                # here, it would look like a failure to those who hear of that before the token.
                self._requests.finish(end.request_id, end.reason)
            if entry is None:
                self._complete(end.request_id)

    def _stop_sending(self, engine_id: str) -> None:
        """Releases the blocks as soon as nobody can read them any more."""
        entry = self._outgoing.by_engine_id(engine_id)
        if entry is None:
            self._release(engine_id)
        elif self._outgoing.start_closing(entry):
            self._agents.broadcast(CloseSend(ticket_id=entry.ticket_id))
            for rank in self._agents.lost_ranks():
                self._closed(rank, entry.ticket_id)

    def tick(self) -> None:
        """Deadlines of a push are the agents' own; nothing here waits on time."""
