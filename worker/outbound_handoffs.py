"""The sender's book of handoffs: one entry per ticket, until every rank's blocks are acknowledged or closed. And what
the roles that send blocks share: they tell the agents what the book says.

    SENDING ──all ranks sent──▶ released (entry removed)
        └── failed, cancelled ──▶ CLOSING ──all ranks closed──▶ released (entry removed)

The prompt's blocks stay leased as long as an agent of the decode worker might read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from kvtransfer.causes import HandoffCause, HandoffFault, parse_cause
from kvtransfer.control import CloseSend, FromAgent, OpenSend, SendClosed, SendFailed, Sent
from kvtransfer.stages import SendStages, earliest, latest
from tandem.clock import Clock
from tandem.engine.api import Engine
from tandem.v1 import worker_pb2
from worker.agents import Agents
from worker.requests import RequestBook
from worker.roles import WorkerIdentity


class OutboundPhase(StrEnum):
    SENDING = "sending"
    CLOSING = "closing"


@dataclass(slots=True)
class OutboundHandoff:
    """One handoff that this worker sends. `pending`: ranks whose agent has not yet ended the present phase."""

    ticket_id: str
    engine_id: str
    taken_up_at_s: float
    pending: set[int]
    phase: OutboundPhase = OutboundPhase.SENDING
    sent_bytes: int = 0
    pieces: int = 0
    first_token_at_s: float | None = None
    stages: list[SendStages] = field(default_factory=list)  # of each rank that sent

    def done_frame(self, request_id: str) -> worker_pb2.HandoffDone:
        """The report to the router once every block is acknowledged."""
        anchor_s = self.taken_up_at_s

        def offset(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - anchor_s

        done = worker_pb2.HandoffDone(
            request_id=request_id, bytes=self.sent_bytes, pieces=self.pieces, anchor_at_s=anchor_s
        )
        if ranks := self.stages:
            sent = worker_pb2.SendStages(
                opened_s=offset(earliest(rank.opened_at_s for rank in ranks)),
                computing_s=offset(earliest(rank.computing_at_s for rank in ranks)),
                linked_s=offset(latest(rank.linked_at_s for rank in ranks)),
                first_piece_s=offset(earliest(rank.first_piece_at_s for rank in ranks)),
                last_layer_s=offset(latest(rank.last_layer_at_s for rank in ranks)),
                last_ack_s=offset(latest(rank.last_ack_at_s for rank in ranks)),
                first_token_s=offset(self.first_token_at_s),
                hidden_bytes=sum(rank.hidden_bytes for rank in ranks),
            )
            done.sent.CopyFrom(sent)
        return done


@dataclass(slots=True)
class OutboundHandoffs:
    """Pure: takes events and returns what is due. SendingRole executes it."""

    tp: int
    _by_ticket: dict[str, OutboundHandoff] = field(default_factory=dict)
    _by_engine_id: dict[str, OutboundHandoff] = field(default_factory=dict)

    def open(self, ticket_id: str, engine_id: str, taken_up_at_s: float) -> OutboundHandoff:
        entry = OutboundHandoff(ticket_id, engine_id, taken_up_at_s, set(range(self.tp)))
        self._by_ticket[ticket_id] = entry
        self._by_engine_id[engine_id] = entry
        return entry

    def by_ticket(self, ticket_id: str) -> OutboundHandoff | None:
        return self._by_ticket.get(ticket_id)

    def by_engine_id(self, engine_id: str) -> OutboundHandoff | None:
        return self._by_engine_id.get(engine_id)

    def sent(self, rank: int, report: Sent) -> OutboundHandoff | None:
        """Returns the entry if this was the last rank to be acknowledged: its blocks may be released."""
        entry = self._by_ticket.get(report.ticket_id)
        if entry is None or entry.phase is not OutboundPhase.SENDING or rank not in entry.pending:
            return None
        entry.sent_bytes += report.bytes
        entry.pieces += report.pieces
        if report.stages is not None:
            entry.stages.append(report.stages)
        return self._rank_done(rank, entry)

    def start_closing(self, entry: OutboundHandoff) -> bool:
        """Returns True if this call began the closing; the caller must then send the close to the agents."""
        if entry.phase is OutboundPhase.CLOSING:
            return False
        entry.phase = OutboundPhase.CLOSING
        entry.pending = set(range(self.tp))
        return True

    def closed(self, rank: int, ticket_id: str) -> OutboundHandoff | None:
        """Returns the entry if this was the last rank to close: its blocks may be released."""
        entry = self._by_ticket.get(ticket_id)
        if entry is None or entry.phase is not OutboundPhase.CLOSING:
            return None
        return self._rank_done(rank, entry)

    def open_entries(self) -> list[OutboundHandoff]:
        return list(self._by_ticket.values())

    def _rank_done(self, rank: int, entry: OutboundHandoff) -> OutboundHandoff | None:
        entry.pending.discard(rank)
        if entry.pending:
            return None
        del self._by_ticket[entry.ticket_id]
        del self._by_engine_id[entry.engine_id]
        return entry


class SendingRole(ABC):
    """Carries out what OutboundHandoffs returns. The role says what follows for the request."""

    SENDER: ClassVar[str]  # the worker's role, for people

    def __init__(
        self, identity: WorkerIdentity, engine: Engine, agents: Agents, requests: RequestBook, clock: Clock
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._agents = agents
        self._requests = requests
        self._clock = clock
        self._handoffs = OutboundHandoffs(identity.tp)

    @abstractmethod
    def _all_sent(self, engine_id: str) -> None:
        """Every block is acknowledged, and the router's frame says so."""

    @abstractmethod
    def _not_sent(self, entry: OutboundHandoff, fault: HandoffFault) -> None:
        """The receiver lacks blocks."""

    @abstractmethod
    def _all_closed(self, engine_id: str) -> None:
        """No agent reads the blocks any more."""

    def request_of(self, ticket_id: str) -> str | None:
        entry = self._handoffs.by_ticket(ticket_id)
        return None if entry is None else entry.engine_id

    def on_agent(self, rank: int, message: FromAgent) -> None:
        match message:
            case Sent():
                if entry := self._handoffs.sent(rank, message):
                    if target := self._requests.frame_of(entry.engine_id):
                        frame, request_id = target
                        frame.handoffs.append(entry.done_frame(request_id))
                    self._all_sent(entry.engine_id)
            case SendFailed(ticket_id=ticket_id, cause=cause, message=text):
                if entry := self._handoffs.by_ticket(ticket_id):
                    fault = HandoffFault(parse_cause(cause), f"the KV blocks were not delivered ({cause}): {text}")
                    self._not_sent(entry, fault)
            case SendClosed(ticket_id=ticket_id):
                self._closed(rank, ticket_id)
            case _:
                pass  # receive messages; attachments and link reports are handled by the leader

    def on_agent_lost(self, rank: int) -> None:
        lost = HandoffFault(HandoffCause.PEER_LOST, f"the {self.SENDER} worker's transfer agent was lost: try again")
        for entry in self._handoffs.open_entries():
            if entry.phase is OutboundPhase.SENDING and rank in entry.pending:
                self._not_sent(entry, lost)
            self._closed(rank, entry.ticket_id)

    def _start_sending(
        self,
        engine_id: str,
        ticket_id: str,
        ticket: worker_pb2.HandoffTicket,
        *,
        first_block: int,
        prompt_tokens: int,
        taken_up_at_s: float,
    ) -> None:
        self._handoffs.open(ticket_id, engine_id, taken_up_at_s)
        self._agents.broadcast(
            OpenSend(
                ticket_id=ticket_id,
                signed_ticket=ticket.signed,
                export_id=engine_id,
                decode_worker=ticket.decode_worker,
                decode_epoch=ticket.decode_epoch,
                first_block=first_block,
                prompt_tokens=prompt_tokens,
            )
        )

    def _stop_sending(self, entry: OutboundHandoff) -> None:
        if self._handoffs.start_closing(entry):
            self._agents.broadcast(CloseSend(ticket_id=entry.ticket_id))
            for rank in self._agents.lost_ranks():
                self._closed(rank, entry.ticket_id)

    def _closed(self, rank: int, ticket_id: str) -> None:
        if entry := self._handoffs.closed(rank, ticket_id):
            self._all_closed(entry.engine_id)
