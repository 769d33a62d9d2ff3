"""The decode side's book of handoffs: one entry per ticket, from reserve until it joined or everything is closed.

    EXPECTING ──all ranks received──▶ VERIFIED ──first token known──▶ joined (entry removed)
        │                                │
        └── failed, cancelled, late ─────┴──▶ CLOSING ──all ranks closed──▶ freed (entry removed)

Blocks are freed only from CLOSING, when every rank's agent has said that it writes nothing more, or has died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.control import Received
from kvtransfer.stages import ReceiveStages
from tandem.clock import Clock
from tandem.errors import InternalError


class Phase(StrEnum):
    EXPECTING = "expecting"
    VERIFIED = "verified"
    CLOSING = "closing"


@dataclass(slots=True)
class Incoming:
    """One handoff on its way in. `pending` holds the ranks whose agent still owes the phase's answer."""

    ticket_id: str
    engine_id: str
    taken_up_at_s: float
    reserved_at_s: float
    pending: set[int]
    phase: Phase = Phase.EXPECTING
    first_token: int | None = None
    first_token_at_s: float | None = None
    join_by_s: float | None = None
    received_bytes: int = 0
    blocks: int = 0
    pieces: int = 0
    verify_s: float = 0.0
    stages: list[ReceiveStages] = field(default_factory=list)  # of each rank that received

    @property
    def can_join(self) -> bool:
        return self.phase is Phase.VERIFIED and self.first_token is not None


@dataclass(slots=True)
class IncomingBook:
    """Pure: takes events and a clock, answers what is due. The role executes it."""

    clock: Clock
    tp: int
    ttl_s: float
    _by_ticket: dict[str, Incoming] = field(default_factory=dict)
    _by_engine_id: dict[str, Incoming] = field(default_factory=dict)

    def open(
        self, ticket_id: str, engine_id: str, *, anything_to_receive: bool, taken_up_at_s: float | None = None
    ) -> Incoming:
        """`taken_up_at_s`: when work on the reservation began; None: now."""
        now_s = self.clock.now_s()
        pending = set(range(self.tp)) if anything_to_receive else set()
        entry = Incoming(ticket_id, engine_id, now_s if taken_up_at_s is None else taken_up_at_s, now_s, pending)
        self._by_ticket[ticket_id] = entry
        self._by_engine_id[engine_id] = entry
        if not pending:
            # Nothing will tell of progress, so nothing but the router's cancel ends the wait for its first token.
            entry.phase = Phase.VERIFIED
        return entry

    def by_ticket(self, ticket_id: str) -> Incoming | None:
        return self._by_ticket.get(ticket_id)

    def by_engine_id(self, engine_id: str) -> Incoming | None:
        return self._by_engine_id.get(engine_id)

    def received(self, rank: int, report: Received) -> Incoming | None:
        """The entry, when this rank's report was one it waited for."""
        entry = self._by_ticket.get(report.ticket_id)
        if entry is None or entry.phase is not Phase.EXPECTING or rank not in entry.pending:
            return None
        entry.pending.discard(rank)
        entry.received_bytes += report.bytes
        entry.blocks = max(entry.blocks, report.blocks)
        entry.pieces += report.pieces
        entry.verify_s = max(entry.verify_s, report.verify_s)
        if report.stages is not None:
            entry.stages.append(report.stages)
        if not entry.pending:
            self._verified(entry)
        return entry

    def _verified(self, entry: Incoming) -> None:
        entry.phase = Phase.VERIFIED
        entry.join_by_s = self.clock.now_s() + self.ttl_s

    def start_closing(self, entry: Incoming) -> bool:
        """True when this call began the closing (the agents must now be told)."""
        if entry.phase is Phase.CLOSING:
            return False
        entry.phase = Phase.CLOSING
        entry.pending = set(range(self.tp))
        return True

    def closed(self, rank: int, ticket_id: str) -> Incoming | None:
        """The entry, when this was the last rank to close: its blocks may now be freed."""
        entry = self._by_ticket.get(ticket_id)
        if entry is None or entry.phase is not Phase.CLOSING:
            return None
        entry.pending.discard(rank)
        if entry.pending:
            return None
        self._remove(entry)
        return entry

    def joined(self, entry: Incoming) -> None:
        if not entry.can_join:
            raise InternalError(f"handoff {entry.ticket_id} cannot join from {entry.phase}")
        self._remove(entry)

    def late(self) -> list[Incoming]:
        """Verified handoffs whose first token never came."""
        now_s = self.clock.now_s()
        return [
            entry
            for entry in self._by_ticket.values()
            if entry.phase is Phase.VERIFIED and entry.join_by_s is not None and entry.join_by_s < now_s
        ]

    def open_entries(self) -> list[Incoming]:
        return list(self._by_ticket.values())

    def _remove(self, entry: Incoming) -> None:
        del self._by_ticket[entry.ticket_id]
        del self._by_engine_id[entry.engine_id]
