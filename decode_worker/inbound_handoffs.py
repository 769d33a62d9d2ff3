"""The receiver's book of handoffs: one entry per ticket, from reserve until the request joined or every rank closed.

    EXPECTING ──all ranks received──▶ VERIFIED ──first token known──▶ joined (entry removed)
        │                                │
        └── failed, cancelled, late ─────┴──▶ CLOSING ──all ranks closed──▶ freed (entry removed)

Blocks are freed only from CLOSING, once every rank's agent has stopped writing or has died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.control import Received
from kvtransfer.stages import ReceiveStages, earliest, latest
from tandem.clock import Clock
from tandem.errors import InternalError
from tandem.v1 import worker_pb2


class InboundPhase(StrEnum):
    EXPECTING = "expecting"
    VERIFIED = "verified"
    CLOSING = "closing"


@dataclass(slots=True)
class InboundHandoff:
    """One handoff that this worker receives. `pending`: ranks whose agent has not yet ended the present phase."""

    ticket_id: str
    engine_id: str
    taken_up_at_s: float
    reserved_at_s: float
    pending: set[int]
    phase: InboundPhase = InboundPhase.EXPECTING
    first_token: int | None = None
    first_token_at_s: float | None = None
    join_by_s: float | None = None
    received_bytes: int = 0
    blocks: int = 0
    pieces: int = 0
    verify_s: float = 0.0
    stages: list[ReceiveStages] = field(default_factory=list)  # of each rank that received
    transports: set[str] = field(default_factory=set)

    @property
    def can_join(self) -> bool:
        return self.phase is InboundPhase.VERIFIED and self.first_token is not None

    def done_frame(self, request_id: str, joined_at_s: float) -> worker_pb2.HandoffDone:
        """The report to the router once the request has joined the decode batch."""
        anchor_s = self.taken_up_at_s

        def offset(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - anchor_s

        ranks = self.stages
        return worker_pb2.HandoffDone(
            request_id=request_id,
            bytes=self.received_bytes,
            blocks=self.blocks,
            pieces=self.pieces,
            verify_s=self.verify_s,
            reserve_to_join_s=joined_at_s - anchor_s,
            anchor_at_s=anchor_s,
            transports=sorted(self.transports),
            received=worker_pb2.ReceiveStages(
                reserved_s=self.reserved_at_s - anchor_s,
                linked_s=offset(latest(rank.linked_at_s for rank in ranks)),
                first_piece_s=offset(earliest(rank.first_piece_at_s for rank in ranks)),
                last_piece_s=offset(latest(rank.last_piece_at_s for rank in ranks)),
                verified_s=offset(latest(rank.verified_at_s for rank in ranks)),
                first_token_s=offset(self.first_token_at_s),
                joined_s=joined_at_s - anchor_s,
            ),
        )


@dataclass(slots=True)
class InboundHandoffs:
    """Pure: takes events and a clock, and returns what is due. The role executes it."""

    clock: Clock
    tp: int
    ttl_s: float
    _by_ticket: dict[str, InboundHandoff] = field(default_factory=dict)
    _by_engine_id: dict[str, InboundHandoff] = field(default_factory=dict)

    def open(
        self, ticket_id: str, engine_id: str, *, anything_to_receive: bool, taken_up_at_s: float
    ) -> InboundHandoff:
        """`taken_up_at_s`: when work on the reservation began."""
        pending = set(range(self.tp)) if anything_to_receive else set()
        entry = InboundHandoff(ticket_id, engine_id, taken_up_at_s, self.clock.now_s(), pending)
        self._by_ticket[ticket_id] = entry
        self._by_engine_id[engine_id] = entry
        if not pending:
            # No block arrives, so no deadline starts: only the router's cancel ends the wait for the first token.
            entry.phase = InboundPhase.VERIFIED
        return entry

    def by_ticket(self, ticket_id: str) -> InboundHandoff | None:
        return self._by_ticket.get(ticket_id)

    def by_engine_id(self, engine_id: str) -> InboundHandoff | None:
        return self._by_engine_id.get(engine_id)

    def received(self, rank: int, report: Received) -> InboundHandoff | None:
        """Returns the entry if this rank was pending."""
        entry = self._by_ticket.get(report.ticket_id)
        if entry is None or entry.phase is not InboundPhase.EXPECTING or rank not in entry.pending:
            return None
        entry.pending.discard(rank)
        entry.received_bytes += report.bytes
        entry.blocks = max(entry.blocks, report.blocks)
        entry.pieces += report.pieces
        entry.verify_s = max(entry.verify_s, report.verify_s)
        entry.transports.update(report.transports)
        if report.stages is not None:
            entry.stages.append(report.stages)
        if not entry.pending:
            self._verified(entry)
        return entry

    def _verified(self, entry: InboundHandoff) -> None:
        entry.phase = InboundPhase.VERIFIED
        entry.join_by_s = self.clock.now_s() + self.ttl_s

    def start_closing(self, entry: InboundHandoff) -> bool:
        """Returns True if this call began the closing; the caller must then send the close to the agents."""
        if entry.phase is InboundPhase.CLOSING:
            return False
        entry.phase = InboundPhase.CLOSING
        entry.pending = set(range(self.tp))
        return True

    def closed(self, rank: int, ticket_id: str) -> InboundHandoff | None:
        """Returns the entry if this was the last rank to close: its blocks may be freed."""
        entry = self._by_ticket.get(ticket_id)
        if entry is None or entry.phase is not InboundPhase.CLOSING:
            return None
        entry.pending.discard(rank)
        if entry.pending:
            return None
        self._remove(entry)
        return entry

    def joined(self, entry: InboundHandoff) -> None:
        if not entry.can_join:
            raise InternalError(
                f"handoff {entry.ticket_id}: expected phase verified and a first token to join, got phase {entry.phase}"
            )
        self._remove(entry)

    def late(self) -> list[InboundHandoff]:
        """Verified handoffs whose first token did not arrive in time."""
        now_s = self.clock.now_s()
        return [
            entry
            for entry in self._by_ticket.values()
            if entry.phase is InboundPhase.VERIFIED and entry.join_by_s is not None and entry.join_by_s < now_s
        ]

    def open_entries(self) -> list[InboundHandoff]:
        return list(self._by_ticket.values())

    def _remove(self, entry: InboundHandoff) -> None:
        del self._by_ticket[entry.ticket_id]
        del self._by_engine_id[entry.engine_id]
