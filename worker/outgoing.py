"""The sending side's book of handoffs: one entry per ticket, until every rank's blocks were acknowledged or closed.

    SENDING ──all ranks sent──▶ released (entry removed)
        └── failed, cancelled ──▶ CLOSING ──all ranks closed──▶ released (entry removed)

The prompt's blocks stay leased as long as an agent of the decode worker might read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.control import Sent
from kvtransfer.stages import SendStages


class Phase(StrEnum):
    SENDING = "sending"
    CLOSING = "closing"


@dataclass(slots=True)
class Outgoing:
    ticket_id: str
    engine_id: str
    taken_up_at_s: float
    pending: set[int]
    phase: Phase = Phase.SENDING
    sent_bytes: int = 0
    pieces: int = 0
    first_token_at_s: float | None = None
    stages: list[SendStages] = field(default_factory=list)  # of each rank that sent


@dataclass(slots=True)
class OutgoingBook:
    """Pure: takes events, answers what is due. The role executes it."""

    tp: int
    _by_ticket: dict[str, Outgoing] = field(default_factory=dict)
    _by_engine_id: dict[str, Outgoing] = field(default_factory=dict)

    def open(self, ticket_id: str, engine_id: str, taken_up_at_s: float) -> Outgoing:
        entry = Outgoing(ticket_id, engine_id, taken_up_at_s, set(range(self.tp)))
        self._by_ticket[ticket_id] = entry
        self._by_engine_id[engine_id] = entry
        return entry

    def by_ticket(self, ticket_id: str) -> Outgoing | None:
        return self._by_ticket.get(ticket_id)

    def by_engine_id(self, engine_id: str) -> Outgoing | None:
        return self._by_engine_id.get(engine_id)

    def sent(self, rank: int, report: Sent) -> Outgoing | None:
        """The entry, when this was the last rank to be acknowledged: its blocks may be released."""
        entry = self._by_ticket.get(report.ticket_id)
        if entry is None or entry.phase is not Phase.SENDING or rank not in entry.pending:
            return None
        entry.sent_bytes += report.bytes
        entry.pieces += report.pieces
        if report.stages is not None:
            entry.stages.append(report.stages)
        return self._answered(rank, entry)

    def start_closing(self, entry: Outgoing) -> bool:
        """True when this call began the closing (the agents must now be told)."""
        if entry.phase is Phase.CLOSING:
            return False
        entry.phase = Phase.CLOSING
        entry.pending = set(range(self.tp))
        return True

    def closed(self, rank: int, ticket_id: str) -> Outgoing | None:
        """The entry, when this was the last rank to close: its blocks may be released."""
        entry = self._by_ticket.get(ticket_id)
        if entry is None or entry.phase is not Phase.CLOSING:
            return None
        return self._answered(rank, entry)

    def open_entries(self) -> list[Outgoing]:
        return list(self._by_ticket.values())

    def _answered(self, rank: int, entry: Outgoing) -> Outgoing | None:
        entry.pending.discard(rank)
        if entry.pending:
            return None
        del self._by_ticket[entry.ticket_id]
        del self._by_engine_id[entry.engine_id]
        return entry
