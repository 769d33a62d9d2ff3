"""The decode role: reserve blocks, wait until they are verified, join the batch, stream tokens; or prefill locally."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from decode_worker.inbound_handoffs import InboundHandoff, InboundHandoffs, InboundPhase
from kvtransfer.causes import HandoffCause, HandoffFault, parse_cause
from kvtransfer.control import CloseReceive, FromAgent, OpenReceive, ReceiveClosed, Received, ReceiveFailed
from kvtransfer.session.ticket import Ticket
from tandem.clock import Clock
from tandem.engine.api import Engine, EngineRequest, RequestEnd, Reservation
from tandem.errors import DeadlineExceeded, InputError, TandemError
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.requests import RequestBook
from worker.roles import WorkerIdentity
from worker.wire import parse_work


class DecodeRole:
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
        self._handoffs = InboundHandoffs(clock, identity.tp, ticket_ttl_s)

    # --- routers -----------------------------------------------------------------------------------------------

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "generate":
                self._generate(session, frame.generate.work)
            case "reserve":
                self._reserve(session, frame.reserve)
            case "join":
                self._join(session, frame.join)
            case kind:
                raise InputError(f"frame: expected generate, reserve or join, got {kind}")

    def owns(self, engine_id: str) -> bool:
        return self._requests.is_open(engine_id)

    def _generate(self, session: int, work: worker_pb2.Work) -> None:
        engine_id = self._requests.open(session, work.request_id, work.trace_id)
        try:
            self._engine.add(self._parse(work, engine_id))
        except TandemError as error:
            self._requests.fail(engine_id, error)

    def _reserve(self, session: int, reserve: worker_pb2.Reserve) -> None:
        taken_up_at_s = self._clock.now_s()
        engine_id = self._requests.open(session, reserve.work.request_id, reserve.work.trace_id)
        try:
            self._agents.require_all()
            request = self._parse(reserve.work, engine_id, use_prefix_cache=reserve.use_prefix_cache)
            reservation = self._engine.reserve(request)
        except TandemError as error:
            self._requests.fail(engine_id, error)
            return
        ticket = self._ticket(reserve, reservation, len(request.prompt))
        missing = reservation.block_ids[reservation.first_missing_block :]
        self._handoffs.open(ticket.ticket_id, engine_id, anything_to_receive=bool(missing), taken_up_at_s=taken_up_at_s)
        if missing:
            self._agents.broadcast(
                OpenReceive(
                    ticket_id=ticket.ticket_id,
                    prefill_worker=reserve.prefill_worker,
                    prefill_epoch=reserve.prefill_epoch,
                    first_block=reservation.first_missing_block,
                    block_ids=missing,
                    prompt_tokens=len(request.prompt),
                )
            )
        if target := self._requests.frame_of(engine_id):
            frame, request_id = target
            reserved = frame.reserved.add(request_id=request_id)
            reserved.ticket.signed = ticket.sign(self._identity.ticket_key)
            reserved.ticket.decode_worker = self._identity.worker_id
            reserved.ticket.decode_epoch = self._identity.epoch
            reserved.ticket.cached_tokens = reservation.cached_tokens

    def _ticket(self, reserve: worker_pb2.Reserve, reservation: Reservation, prompt_tokens: int) -> Ticket:
        return Ticket(
            ticket_id=secrets.token_hex(16),
            request_id=reserve.work.request_id,
            decode_worker=self._identity.worker_id,
            decode_epoch=self._identity.epoch,
            prefill_worker=reserve.prefill_worker,
            prefill_epoch=reserve.prefill_epoch,
            first_block=reservation.first_missing_block,
            block_count=len(reservation.block_ids) - reservation.first_missing_block,
            prompt_tokens=prompt_tokens,
            ttl_s=self._ttl_s,
        )

    def _join(self, session: int, join: worker_pb2.Join) -> None:
        engine_id = self._requests.find(session, join.request_id)
        entry = self._handoffs.by_engine_id(engine_id) if engine_id else None
        if entry is None or entry.phase is InboundPhase.CLOSING:
            return  # it ended in the meantime, and that was reported to the router
        entry.first_token = join.first_token
        entry.first_token_at_s = self._clock.now_s()
        self._join_if_ready(entry)

    def _parse(self, work: worker_pb2.Work, engine_id: str, *, use_prefix_cache: bool = True) -> EngineRequest:
        fingerprint = self._identity.model_fingerprint
        return parse_work(work, engine_id=engine_id, model_fingerprint=fingerprint, use_prefix_cache=use_prefix_cache)

    # --- transfer agents ---------------------------------------------------------------------------------------

    def on_agent(self, rank: int, message: FromAgent) -> None:
        match message:
            case Received():
                if entry := self._handoffs.received(rank, message):
                    self._join_if_ready(entry)
            case ReceiveFailed(ticket_id=ticket_id, cause=cause, message=text):
                if entry := self._handoffs.by_ticket(ticket_id):
                    fault = HandoffFault(parse_cause(cause), f"the KV blocks did not arrive ({cause}): {text}")
                    self.cancel(entry.engine_id, fault)
            case ReceiveClosed(ticket_id=ticket_id):
                self._closed(rank, ticket_id)
            case _:
                pass  # attachments and link reports are handled by the leader

    def on_agent_lost(self, rank: int) -> None:
        lost = HandoffFault(HandoffCause.PEER_LOST, "the decode worker's transfer agent was lost: try again")
        for entry in self._handoffs.open_entries():
            if entry.phase is InboundPhase.EXPECTING and rank in entry.pending:
                self.cancel(entry.engine_id, lost)
            self._closed(rank, entry.ticket_id)

    def _closed(self, rank: int, ticket_id: str) -> None:
        if entry := self._handoffs.closed(rank, ticket_id):
            self._engine.cancel(entry.engine_id)

    def _join_if_ready(self, entry: InboundHandoff) -> None:
        if not entry.can_join or entry.first_token is None:
            return
        self._handoffs.joined(entry)
        try:
            self._engine.join(entry.engine_id, entry.first_token)
        except TandemError as error:
            self._engine.cancel(entry.engine_id)
            self._requests.fail(entry.engine_id, error)
            return
        if target := self._requests.frame_of(entry.engine_id):
            frame, request_id = target
            frame.handoffs.append(entry.done_frame(request_id, self._clock.now_s()))

    # --- ends --------------------------------------------------------------------------------------------------

    def request_of(self, ticket_id: str) -> str | None:
        entry = self._handoffs.by_ticket(ticket_id)
        return None if entry is None else entry.engine_id

    def cancel(self, engine_id: str, error: TandemError) -> None:
        """Reports the error to the router at once; frees the blocks when no agent writes to them any more."""
        self._requests.fail(engine_id, error)
        entry = self._handoffs.by_engine_id(engine_id)
        if entry is None:
            self._engine.cancel(engine_id)
        elif self._handoffs.start_closing(entry):
            self._agents.broadcast(CloseReceive(ticket_id=entry.ticket_id))
            for rank in self._agents.lost_ranks():
                self._closed(rank, entry.ticket_id)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        for end in ended:
            if end.error is not None:
                self._requests.fail(end.request_id, end.error)
            elif end.reason is not None:
                self._requests.finish(end.request_id, end.reason)

    def tick(self) -> None:
        for entry in self._handoffs.late():
            late = DeadlineExceeded(f"the first token did not arrive within {self._ttl_s:g} s of the last block")
            self.cancel(entry.engine_id, late)
