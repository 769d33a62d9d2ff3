"""The prefill role: compute the prompt, push its blocks as they finish, sample the first token."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.session.ticket import ticket_id_of
from tandem.clock import Clock
from tandem.engine.api import Engine, RequestEnd
from tandem.errors import HandoffError, InputError, TandemError
from tandem.request import RequestState
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.outbound_handoffs import OutboundHandoff, SendingRole
from worker.requests import RequestBook
from worker.roles import WorkerIdentity
from worker.wire import parse_work


class PrefillRole(SendingRole):
    """A request ends here when its first token is sent *and* its blocks are acknowledged. Both are tracked separately,
    because the router must not wait for the second."""

    SENDER = "prefill"

    def __init__(
        self, identity: WorkerIdentity, engine: Engine, agents: Agents, requests: RequestBook, clock: Clock
    ) -> None:
        super().__init__(identity, engine, agents, requests, clock)
        self._engine_ids: set[str] = set()  # owned by this role, until their blocks are released
        self._prefilled: set[str] = set()  # left the engine, but their blocks are still leased

    # --- routers -----------------------------------------------------------------------------------------------

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """Raises InputError when the router already has a request of that id here."""
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
        if self._handoffs.by_ticket(ticket_id) is not None:
            raise InputError("ticket: expected a new ticket, got one that is in use", field="ticket")
        first_block = ticket.cached_tokens // self._identity.block_tokens
        request = parse_work(
            prefill.work,
            engine_id=engine_id,
            model_fingerprint=self._identity.model_fingerprint,
            export_from_block=first_block,
        )
        self._engine.add(request)
        prompt_tokens = len(request.prompt)
        if first_block * self._identity.block_tokens >= prompt_tokens or request.sampling.max_tokens == 1:
            return  # the decode worker has every block or needs none: only the first token is missing
        self._start_sending(
            engine_id,
            ticket_id,
            ticket,
            first_block=first_block,
            prompt_tokens=prompt_tokens,
            taken_up_at_s=taken_up_at_s,
        )

    # --- transfer agents ---------------------------------------------------------------------------------------

    def _all_sent(self, engine_id: str) -> None:
        if engine_id in self._prefilled:  # the first token is sent too
            self._requests.close(engine_id, RequestState.FINISHED)
            self._release(engine_id)

    def _not_sent(self, entry: OutboundHandoff, fault: HandoffFault) -> None:
        self.cancel(entry.engine_id, fault)

    def _all_closed(self, engine_id: str) -> None:
        self._release(engine_id)

    def _release(self, engine_id: str) -> None:
        self._engine_ids.discard(engine_id)
        if engine_id in self._prefilled:
            self._prefilled.discard(engine_id)
            self._engine.release_export(engine_id)
        else:
            self._engine.cancel(engine_id)

    # --- ends --------------------------------------------------------------------------------------------------

    def cancel(self, engine_id: str, error: TandemError) -> None:
        """Reports the error to the router at once; releases the blocks when no agent reads them any more."""
        self._requests.fail(engine_id, error)
        if (entry := self._handoffs.by_engine_id(engine_id)) is None:
            self._release(engine_id)
        else:
            self._stop_sending(entry)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        for end in ended:
            if isinstance(end.error, HandoffError):
                self.cancel(end.request_id, HandoffFault(HandoffCause.TRANSPORT, end.error.message))
                continue
            if end.error is not None:
                self.cancel(end.request_id, end.error)
                continue
            self._prefilled.add(end.request_id)
            entry = self._handoffs.by_engine_id(end.request_id)
            if entry is not None:
                entry.first_token_at_s = self._clock.now_s()
            if end.reason is not None:
                # The first token ended the request. The router cancels the handoff at the decode worker: if this side
                # closed it, the decode worker could report a failure before the token arrives.
                self._requests.finish(end.request_id, end.reason)
            if entry is None:  # nothing to hand off, so no report will say that this side is done
                self._requests.part_done(end.request_id)
                self._release(end.request_id)

    def tick(self) -> None:
        """The agents keep the deadlines of a push; this role has none."""
