"""The receiving half of a handoff on one rank: tracks which blocks have arrived. Pure.

    EXPECTING ──first link opened──▶ RECEIVING ──every link finished, all blocks verified──▶ RECEIVED
        ├── failed ──▶ FAILING ──no write in progress──▶ FAILED
        └── close ───▶ CLOSING ──no write in progress──▶ CLOSED

A write is in progress between `begin_piece` and `end_piece`. None begins once the session has left RECEIVING.
ReceiveFailed and ReceiveClosed are reported only without a write in progress, so the blocks may then have another
owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.control import FromAgent, OpenReceive, ReceiveClosed, Received, ReceiveFailed
from kvtransfer.pool.pool import PoolSpan, payload_bytes
from kvtransfer.session.piece import Piece
from kvtransfer.session.reshard import PlannedLink, reshard_plan
from kvtransfer.session.ticket import MAX_COMPUTING_S, Ticket
from kvtransfer.stages import ReceiveStages
from tandem.clock import Clock
from tandem.kvcache.layout import KvPoolLayout, blocks_for


class ReceiveState(StrEnum):
    EXPECTING = "expecting"
    RECEIVING = "receiving"
    RECEIVED = "received"
    FAILING = "failing"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tells the senders on all open links that this ticket takes no more pieces."""

    cause: HandoffCause
    message: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    prefill_rank: int
    seq: int


@dataclass(frozen=True, slots=True)
class ReportReceive:
    """Reports to the leader."""

    message: FromAgent


ReceiveAction = Refuse | Acknowledge | ReportReceive


@dataclass(frozen=True, slots=True)
class ReceivingRank:
    """The receiving rank's place in the reshard plan."""

    rank: int
    tp: int
    model_kv_heads: int


@dataclass(slots=True)
class _IncomingLink:
    """A link of the plan that ends at this rank."""

    link: PlannedLink
    is_open: bool = False
    next_seq: int = 0
    finished: bool = False


class ReceiveSession:
    """One ticket on one decode rank.

    Raises:
        HandoffFault: (protocol) the lease is invalid: blocks outside the pool or the prompt, or duplicate blocks.
    """

    def __init__(
        self,
        lease: OpenReceive,
        local: ReceivingRank,
        layout: KvPoolLayout,
        clock: Clock,
        *,
        ttl_s: float,
        digests: bool,
    ) -> None:
        _check_lease(lease, layout)
        self.lease = lease
        self.state = ReceiveState.EXPECTING
        self._local = local
        self._layout = layout
        self._clock = clock
        self._ttl_s = ttl_s
        self._digests = digests
        self._end_block = lease.first_block + len(lease.block_ids)
        self._prompt_blocks = blocks_for(lease.prompt_tokens, layout.block_tokens)
        self._sources: dict[int, _IncomingLink] = {}
        self._prefill_tp: int | None = None
        shape = (len(lease.block_ids), layout.layers, layout.kv_heads)
        self._there = np.zeros(shape, np.bool_)
        self._missing = self._there.size
        self._writes = 0
        self._failure: tuple[HandoffCause, str] | None = None
        self._bytes = 0
        self._pieces = 0
        self._verify_s = 0.0
        self._stages = ReceiveStages(clock.now_s())
        self._began_s = clock.now_s()
        self._deadline_s = self._began_s + ttl_s

    # --- events ------------------------------------------------------------------------------------------------

    def start(self) -> list[ReceiveAction]:
        """Reports Received at once if there is nothing to receive."""
        if self._missing:
            return []
        self.state = ReceiveState.RECEIVED
        return [ReportReceive(Received(self.lease.ticket_id, 0, 0, 0, 0.0))]

    def open_link(self, ticket: Ticket, prefill_rank: int, prefill_tp: int) -> None:
        """Opens a link whose sender presented the verified ticket.

        Raises:
            HandoffFault: the ticket is not of this lease, the rank does not send to this one, or it is too late.
        """
        lease = self.lease
        if self.state not in (ReceiveState.EXPECTING, ReceiveState.RECEIVING):
            raise HandoffFault(HandoffCause.REFUSED_TICKET, f"this ticket is {self.state} here")
        if (ticket.prefill_worker, ticket.prefill_epoch) != (lease.prefill_worker, lease.prefill_epoch):
            raise HandoffFault(HandoffCause.STALE_EPOCH, "the ticket is for another epoch of the prefill worker")
        if (ticket.first_block, ticket.block_count, ticket.prompt_tokens) != (
            lease.first_block,
            len(lease.block_ids),
            lease.prompt_tokens,
        ):
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "the ticket's blocks differ from the leased ones")
        if self._prefill_tp not in (None, prefill_tp):
            raise protocol_fault(f"expected all links from a worker of tp {self._prefill_tp}, got tp {prefill_tp}")
        if self._prefill_tp is None:
            plan = reshard_plan(prefill_tp, self._local.tp, self._local.model_kv_heads)
            self._sources = {
                link.prefill_rank: _IncomingLink(link) for link in plan if link.decode_rank == self._local.rank
            }
            self._prefill_tp = prefill_tp
        source = self._sources.get(prefill_rank)
        if source is None or source.is_open:
            raise protocol_fault(f"expected one link from each of ranks {sorted(self._sources)}, got {prefill_rank}")
        source.is_open = True
        self._stages.linked_at_s = self._clock.now_s()
        self.state = ReceiveState.RECEIVING
        self._renew()

    def begin_piece(self, prefill_rank: int, piece: Piece) -> PoolSpan:
        """The place of the piece in the pool. Each successful call must be followed by `end_piece` or `drop_piece`.

        Raises:
            HandoffFault: this link may not send the piece now. The session must fail with this cause.
        """
        if self.state is not ReceiveState.RECEIVING:
            raise HandoffFault(HandoffCause.REFUSED_TICKET, f"this ticket is {self.state} here")
        source = self._sources.get(prefill_rank)
        if source is None or not source.is_open or source.finished:
            raise protocol_fault(f"prefill rank {prefill_rank} has no open link for this ticket")
        self._check_piece(source, piece)
        cells = self._there[self._cells(source.link, piece)]
        if cells.any():
            raise protocol_fault(f"piece {piece.seq} repeats blocks that have arrived")
        self._stages.piece_begins(self._clock.now_s())
        cells[:] = True
        source.next_seq += 1
        self._missing -= cells.size
        self._writes += 1
        offset = piece.first_block - self.lease.first_block
        return PoolSpan(
            self.lease.block_ids[offset : offset + piece.block_count],
            piece.last_block_tokens,
            piece.layer_start,
            piece.layer_count,
            source.link.dst_head + piece.head_start - source.link.head_start,
            piece.head_count,
        )

    def end_piece(self, prefill_rank: int, piece: Piece, digest: int, verify_s: float) -> list[ReceiveAction]:
        """The piece is written. `digest` is of the bytes as they were read or received, to be written here."""
        self._writes -= 1
        if self.state is not ReceiveState.RECEIVING:
            return self._over_if_drained()
        if piece.digest is not None and piece.digest != digest:
            return self.fail(
                HandoffCause.DIGEST_MISMATCH,
                f"piece {piece.seq} of prefill rank {prefill_rank} was corrupted in transit",
            )
        self._renew()
        self._stages.last_piece_at_s = self._clock.now_s()
        self._bytes += piece.payload_bytes
        self._pieces += 1
        self._verify_s += verify_s
        return [Acknowledge(prefill_rank, piece.seq)]

    def drop_piece(self, cause: HandoffCause, message: str) -> list[ReceiveAction]:
        """The write started by `begin_piece` ended without the piece."""
        self._writes -= 1
        return [*self.fail(cause, message), *self._over_if_drained()]

    def finish(self, prefill_rank: int, pieces: int) -> list[ReceiveAction]:
        """The sender sent all pieces, and still owned its blocks after our last copy."""
        source = self._sources.get(prefill_rank)
        if self.state is not ReceiveState.RECEIVING or source is None or not source.is_open:
            return []
        if pieces != source.next_seq:
            message = f"expected {pieces} pieces from prefill rank {prefill_rank}, got {source.next_seq}"
            return self.fail(HandoffCause.INCOMPLETE, message)
        source.finished = True
        if not all(each.finished for each in self._sources.values()):
            return []
        if self._missing or self._writes:
            return self.fail(HandoffCause.INCOMPLETE, f"every link finished, but {self._missing} parts are missing")
        self.state = ReceiveState.RECEIVED
        blocks = len(self.lease.block_ids)
        self._stages.verified_at_s = self._clock.now_s()
        report = Received(self.lease.ticket_id, self._bytes, blocks, self._pieces, self._verify_s, self._stages)
        return [ReportReceive(report)]

    def still_computing(self) -> None:
        """The sender's engine is still at work on the prompt. It is believed for MAX_COMPUTING_S."""
        if self.state is ReceiveState.RECEIVING and self._clock.now_s() - self._began_s <= MAX_COMPUTING_S:
            self._renew()

    def link_down(self, prefill_rank: int, cause: HandoffCause, reason: str) -> list[ReceiveAction]:
        source = self._sources.get(prefill_rank)
        if source is None or not source.is_open or source.finished:
            return []
        return self.fail(cause, reason)

    def fail(self, cause: HandoffCause, message: str) -> list[ReceiveAction]:
        if self.state not in (ReceiveState.EXPECTING, ReceiveState.RECEIVING):
            return []
        self.state = ReceiveState.FAILING
        self._failure = (cause, message)
        return [Refuse(cause, message), *self._over_if_drained()]

    def close(self) -> list[ReceiveAction]:
        """Leads to one ReceiveClosed. A failure not yet reported is no longer reported."""
        match self.state:
            case ReceiveState.EXPECTING | ReceiveState.RECEIVING:
                refuse = Refuse(HandoffCause.CANCELLED, "the decode worker closed the handoff")
                self.state = ReceiveState.CLOSING
                return [refuse, *self._over_if_drained()]
            case ReceiveState.CLOSING | ReceiveState.CLOSED:
                return []
            case _:
                self.state = ReceiveState.CLOSING
                return self._over_if_drained()

    def tick(self) -> list[ReceiveAction]:
        if self._clock.now_s() < self._deadline_s:
            return []
        return self.fail(HandoffCause.DEADLINE, f"no progress within {self._ttl_s:g} s")

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the session has ended and may be forgotten. A later close is answered at once."""
        return self.state in (ReceiveState.RECEIVED, ReceiveState.FAILED, ReceiveState.CLOSED)

    # --- internals ---------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self._deadline_s = self._clock.now_s() + self._ttl_s

    def _over_if_drained(self) -> list[ReceiveAction]:
        if self._writes:
            return []
        if self.state is ReceiveState.FAILING and self._failure is not None:
            self.state = ReceiveState.FAILED
            cause, message = self._failure
            return [ReportReceive(ReceiveFailed(self.lease.ticket_id, cause.value, message))]
        if self.state is ReceiveState.CLOSING:
            self.state = ReceiveState.CLOSED
            return [ReportReceive(ReceiveClosed(self.lease.ticket_id))]
        return []

    def _cells(self, link: PlannedLink, piece: Piece) -> tuple[slice, slice, slice]:
        block = piece.first_block - self.lease.first_block
        head = link.dst_head + piece.head_start - link.head_start
        return (
            slice(block, block + piece.block_count),
            slice(piece.layer_start, piece.layer_start + piece.layer_count),
            slice(head, head + piece.head_count),
        )

    def _check_piece(self, source: _IncomingLink, piece: Piece) -> None:
        """Checks a piece from the wire against the lease and the plan."""
        layout, link = self._layout, source.link
        if piece.seq != source.next_seq:
            raise protocol_fault(f"expected piece {source.next_seq}, got {piece.seq}")
        if piece.dtype != layout.dtype:
            raise protocol_fault(f"expected dtype {layout.dtype}, got {piece.dtype}")
        if self._digests and piece.digest is None:
            raise protocol_fault("expected a piece with a digest")
        inside = (
            self.lease.first_block <= piece.first_block < piece.end_block <= self._end_block
            and 0 <= piece.layer_start < piece.layer_start + piece.layer_count <= layout.layers
            and link.head_start <= piece.head_start
            and piece.head_count > 0
            and piece.head_start + piece.head_count <= link.head_start + link.head_count
        )
        if not inside:
            raise protocol_fault(f"piece {piece.seq} is outside the lease or the plan")
        tokens = layout.block_tokens
        if piece.end_block == self._prompt_blocks:
            tokens = layout.last_tokens(self.lease.prompt_tokens)
        if piece.last_block_tokens != tokens:
            block, found = piece.end_block - 1, piece.last_block_tokens
            raise protocol_fault(f"expected {tokens} valid tokens in block {block}, got {found}")
        size = payload_bytes(layout, piece.block_count, tokens, piece.layer_count, piece.head_count)
        if piece.payload_bytes != size:
            raise protocol_fault(f"expected {size} bytes, got {piece.payload_bytes}")


def _check_lease(lease: OpenReceive, layout: KvPoolLayout) -> None:
    ids = lease.block_ids
    if any(not 0 <= block < layout.num_blocks for block in ids) or len(set(ids)) != len(ids):
        raise protocol_fault("lease: expected distinct physical blocks of this pool")
    if lease.first_block < 0 or lease.first_block + len(ids) > blocks_for(lease.prompt_tokens, layout.block_tokens):
        raise protocol_fault("lease: expected blocks within the prompt")
