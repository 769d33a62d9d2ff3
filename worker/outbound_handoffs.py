"""The sender's book of handoffs: one entry per ticket, until every rank's blocks are acknowledged or closed.

    SENDING ──all ranks sent──▶ released (entry removed)
        └── failed, cancelled ──▶ CLOSING ──all ranks closed──▶ released (entry removed)

The prompt's blocks stay leased as long as an agent of the decode worker might read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.control import Sent
from kvtransfer.stages import SendStages, earliest, latest
from tandem.v1 import worker_pb2


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
    """Pure: takes events and returns what is due. The role executes it."""

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
