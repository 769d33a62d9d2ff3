"""The sending half of a handoff on one rank: turns finished ranges into pieces and tracks acknowledgements. Pure.

    SENDING ──every piece acknowledged──▶ SENT
        ├── failed ──▶ FAILED ──close──▶ CLOSING
        └── close ──────────────────────▶ CLOSING ──no link can read our blocks──▶ CLOSED

Each link goes WAITING → OPENING → ACCEPTED, and then FINISHED, or ABORTING → ENDED. FINISH is sent only after the last
acknowledgement, so the receiver never accepts blocks that the ticket no longer owned when it read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.control import FromAgent, SendClosed, SendFailed, Sent
from kvtransfer.pool.pool import PoolSpan, payload_bytes
from kvtransfer.session.exports import Ready
from kvtransfer.session.piece import MAX_PIECE_BLOCKS, MAX_PIECE_BYTES, MIN_PIECE_BYTES, Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.session.ticket import MAX_COMPUTING_S, Ticket
from kvtransfer.stages import SendStages
from tandem.clock import Clock
from tandem.kvcache.layout import KvPoolLayout, blocks_for

FIRST_PIECE_PARTS = 4  # a prompt's first piece is at most this part of the link's largest: it starts early


class SendState(StrEnum):
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


class LinkPhase(StrEnum):
    WAITING = "waiting"  # the link is not ready yet
    OPENING = "opening"  # OPEN was sent
    ACCEPTED = "accepted"
    FINISHED = "finished"  # FINISH was sent
    ABORTING = "aborting"  # ABORT was sent
    ENDED = "ended"  # the receiver can no longer read our blocks


@dataclass(frozen=True, slots=True)
class Open:
    """Presents the ticket on the link to this decode rank."""

    decode_rank: int


@dataclass(frozen=True, slots=True)
class PushPiece:
    decode_rank: int
    piece: Piece
    span: PoolSpan


@dataclass(frozen=True, slots=True)
class Finish:
    decode_rank: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Abort:
    decode_rank: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Tells the receiver that the prompt is still computed."""

    decode_rank: int


@dataclass(frozen=True, slots=True)
class ReportSend:
    """Reports to the leader."""

    message: FromAgent


SendAction = Open | PushPiece | Finish | Abort | Renew | ReportSend


@dataclass(slots=True)
class _LinkState:
    link: PlannedLink
    phase: LinkPhase = LinkPhase.WAITING
    queued: list[PushPiece] = field(default_factory=list)
    unacknowledged: dict[int, int] = field(default_factory=dict)  # seq → bytes
    next_seq: int = 0
    max_piece_bytes: int = MAX_PIECE_BYTES


class SendSession:
    """One ticket on one prefill rank.

    Args:
        links: this rank's links to the ticket's decode worker, from the reshard plan; may be empty (replicated heads).
    """

    def __init__(self, ticket: Ticket, links: tuple[PlannedLink, ...], layout: KvPoolLayout, clock: Clock) -> None:
        self.ticket = ticket
        self.state = SendState.SENDING
        self.stages = SendStages(clock.now_s())
        self._layout = layout
        self._clock = clock
        self._links = {link.decode_rank: _LinkState(link) for link in links}
        self._pushed = np.zeros((ticket.block_count, layout.layers), np.bool_)
        self._gathered: Ready | None = None
        self._bytes = 0
        self._pieces = 0
        self._began_s = clock.now_s()
        self._deadline_s = self._began_s + ticket.ttl_s

    # --- events ------------------------------------------------------------------------------------------------

    def start(self) -> list[SendAction]:
        """Reports Sent at once if there is nothing to send."""
        return self._sent_if_complete()

    def link_ready(self, decode_rank: int, max_piece_bytes: int = MAX_PIECE_BYTES) -> list[SendAction]:
        state = self._links[decode_rank]
        state.max_piece_bytes = max_piece_bytes
        if self.state is not SendState.SENDING or state.phase is not LinkPhase.WAITING:
            return []
        state.phase = LinkPhase.OPENING
        return [Open(decode_rank)]

    def accepted(self, decode_rank: int) -> list[SendAction]:
        state = self._links[decode_rank]
        if state.phase is not LinkPhase.OPENING:
            return []
        state.phase = LinkPhase.ACCEPTED
        self._renew()
        self.stages.linked_at_s = self._clock.now_s()
        pushes: list[SendAction] = [*state.queued]
        self.stages.pieces_leave(len(pushes), self._clock.now_s())
        state.queued.clear()
        return pushes

    def ready(self, ready: Ready) -> list[SendAction]:
        """A range of layers is in the pool. Layers are gathered into pieces of at least MIN_PIECE_BYTES, except the
        last."""
        if self.state is not SendState.SENDING:
            return []
        self._renew()
        self.stages.computing(self._clock.now_s())  # unless `begin_step` reported it before
        actions: list[SendAction] = []
        if self._gathered is not None and self._gathered.continues_with(ready):
            ready = self._gathered.and_layers_of(ready)
        elif self._gathered is not None:
            actions += self._push(self._gathered)
        self._gathered = ready
        layout = self._layout
        size = payload_bytes(layout, len(ready.block_ids), layout.block_tokens, ready.layer_count, layout.kv_heads)
        if size >= MIN_PIECE_BYTES or ready.layer_start + ready.layer_count >= layout.layers:
            actions += self._push(ready)
            self._gathered = None
        return actions

    def still_computing(self) -> list[SendAction]:
        """The engine is at work: what it has yet to compute is late, and not lost. Renews the deadlines of both ends,
        up to MAX_COMPUTING_S after the ticket was opened."""
        is_over = self.state is not SendState.SENDING or self._all_pushed
        if is_over or self._clock.now_s() - self._began_s > MAX_COMPUTING_S:
            return []
        self._renew()
        return [Renew(rank) for rank, state in self._links.items() if state.phase is LinkPhase.ACCEPTED]

    def _push(self, ready: Ready) -> list[SendAction]:
        """Sends the part of a range that the ticket covers and that was not sent before."""
        if self.state is not SendState.SENDING:
            return []
        try:
            rectangles = list(self._new_rectangles(ready))
        except HandoffFault as fault:
            return self.fail(fault.cause, fault.message)
        now_s = self._clock.now_s()
        if self._all_pushed:
            self.stages.last_layer(self._bytes, now_s)
        actions: list[SendAction] = []
        for state in self._links.values():
            for rectangle in rectangles:
                for push in self._cut(state, rectangle):
                    (actions if state.phase is LinkPhase.ACCEPTED else state.queued).append(push)
        self.stages.pieces_leave(len(actions), now_s)
        return actions

    def acknowledged(self, decode_rank: int, seq: int) -> list[SendAction]:
        state = self._links[decode_rank]
        if self.state is not SendState.SENDING:
            return []
        size = state.unacknowledged.pop(seq, None)
        if size is None:
            return self.fail(HandoffCause.PROTOCOL, f"decode rank {decode_rank} acknowledged an unknown piece, {seq}")
        self._renew()
        self.stages.last_ack_at_s = self._clock.now_s()
        self._bytes += size
        self._pieces += 1
        if state.unacknowledged or state.queued or not self._all_pushed:
            return []
        state.phase = LinkPhase.FINISHED
        return [Finish(decode_rank, state.next_seq), *self._sent_if_complete()]

    def link_down(self, decode_rank: int, cause: HandoffCause, reason: str, *, final: bool) -> list[SendAction]:
        """The connection ended, so its receiver reads no more. A link that never carried this ticket may reconnect,
        unless `final`."""
        state = self._links[decode_rank]
        if state.phase is LinkPhase.WAITING and not final:
            return []
        hurt = state.phase is not LinkPhase.FINISHED
        state.phase = LinkPhase.ENDED
        if self.state is SendState.SENDING and hurt:
            return self.fail(cause, reason)
        return self._closed_if_drained()

    def aborted(self, decode_rank: int) -> list[SendAction]:
        state = self._links[decode_rank]
        if state.phase is LinkPhase.ABORTING:
            state.phase = LinkPhase.ENDED
        return self._closed_if_drained()

    def fail(self, cause: HandoffCause, message: str) -> list[SendAction]:
        """Reports to the leader at once, and tells the receivers to stop reading."""
        if self.state is not SendState.SENDING:
            return []
        self.state = SendState.FAILED
        return [*self._abort_all(), ReportSend(SendFailed(self.ticket.ticket_id, cause.value, message))]

    def close(self) -> list[SendAction]:
        """Leads to one SendClosed, from any state in which it was not reported."""
        match self.state:
            case SendState.SENDING:
                self.state = SendState.CLOSING
                return [*self._abort_all(), *self._closed_if_drained()]
            case SendState.FAILED:
                self.state = SendState.CLOSING
                return self._closed_if_drained()
            case SendState.SENT:
                self.state = SendState.CLOSED
                return [ReportSend(SendClosed(self.ticket.ticket_id))]
            case _:
                return []

    def tick(self) -> list[SendAction]:
        """Checks the deadlines of sending, and then of receivers that do not answer an abort."""
        if self._clock.now_s() < self._deadline_s:
            return []
        if self.state is SendState.SENDING:
            return self.fail(HandoffCause.DEADLINE, f"no progress within {self.ticket.ttl_s:g} s")
        for state in self._links.values():
            state.phase = LinkPhase.ENDED
        return self._closed_if_drained()

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        return self.state is SendState.SENDING

    @property
    def is_over(self) -> bool:
        """Whether the session has ended and may be forgotten. A later close is answered at once."""
        drained = all(state.phase in _NOT_READING for state in self._links.values())
        return self.state in (SendState.SENT, SendState.CLOSED) or (self.state is SendState.FAILED and drained)

    @property
    def decode_ranks(self) -> tuple[int, ...]:
        return tuple(self._links)

    # --- internals ---------------------------------------------------------------------------------------------

    @property
    def _all_pushed(self) -> bool:
        return bool(self._pushed.all())

    def _renew(self) -> None:
        self._deadline_s = self._clock.now_s() + self.ticket.ttl_s

    def _sent_if_complete(self) -> list[SendAction]:
        complete = self._all_pushed and all(state.phase is LinkPhase.FINISHED for state in self._links.values())
        if self.state is not SendState.SENDING or not (complete or not self.ticket.block_count or not self._links):
            return []
        self.state = SendState.SENT
        stages = self.stages if self._pieces else None
        return [ReportSend(Sent(self.ticket.ticket_id, self._bytes, self._pieces, stages))]

    def _abort_all(self) -> list[SendAction]:
        self._renew()
        actions: list[SendAction] = []
        for decode_rank, state in self._links.items():
            state.queued.clear()
            if state.phase is LinkPhase.WAITING:
                state.phase = LinkPhase.ENDED
            elif state.phase in (LinkPhase.OPENING, LinkPhase.ACCEPTED, LinkPhase.FINISHED):
                state.phase = LinkPhase.ABORTING
                actions.append(Abort(decode_rank))
        return actions

    def _closed_if_drained(self) -> list[SendAction]:
        if self.state is not SendState.CLOSING or not all(s.phase in _NOT_READING for s in self._links.values()):
            return []
        self.state = SendState.CLOSED
        return [ReportSend(SendClosed(self.ticket.ticket_id))]

    def _new_rectangles(self, ready: Ready) -> Iterator[Ready]:
        """The parts of `ready` inside the ticket that were not sent before, as rectangles of blocks × layers."""
        ticket, block_tokens = self.ticket, self._layout.block_tokens
        end = ready.first_block + len(ready.block_ids)
        prompt_blocks = blocks_for(ticket.prompt_tokens, block_tokens)
        if ready.last_block_tokens < block_tokens and end != prompt_blocks:
            end -= 1  # a partial block in mid-prompt is exported again when full
        first, end = max(ready.first_block, ticket.first_block), min(end, ticket.end_block)
        if end > prompt_blocks or not 0 < ready.last_block_tokens <= block_tokens:
            raise protocol_fault("the engine exported blocks beyond the prompt")
        if first >= end:
            return
        last_tokens = self._layout.last_tokens(ticket.prompt_tokens) if end == prompt_blocks else block_tokens
        if end == ready.first_block + len(ready.block_ids) and last_tokens != ready.last_block_tokens:
            raise protocol_fault(f"expected {last_tokens} tokens in the last block, got {ready.last_block_tokens}")
        layers = slice(ready.layer_start, ready.layer_start + ready.layer_count)
        cells = self._pushed[first - ticket.first_block : end - ticket.first_block, layers]
        if not cells.any():
            runs = [(0, end - first, ready.layer_start, ready.layer_count)]
        else:  # the engine recomputed some of it; only the missing part is sent
            runs = [
                (block, 1, ready.layer_start + int(layer), 1)
                for block in range(end - first)
                for layer in np.flatnonzero(~cells[block])
            ]
        cells[:] = True
        for block, count, layer_start, layer_count in runs:
            start = first + block
            ids = ready.block_ids[start - ready.first_block : start - ready.first_block + count]
            tokens = last_tokens if start + count == end else block_tokens
            yield Ready(start, ids, tokens, layer_start, layer_count)

    def _cut(self, state: _LinkState, rectangle: Ready) -> Iterator[PushPiece]:
        """Pieces for one link. Each may be twice as large as the previous one, up to the link's limit, so the first
        piece starts early and there are few pieces."""
        link, layout = state.link, self._layout
        per_block = payload_bytes(layout, 1, layout.block_tokens, rectangle.layer_count, link.head_count)
        start, limit = 0, max(MAX_PIECE_BYTES, state.max_piece_bytes // FIRST_PIECE_PARTS)
        while start < len(rectangle.block_ids):
            step = max(1, min(limit // per_block, MAX_PIECE_BLOCKS))
            limit = min(2 * limit, state.max_piece_bytes)
            ids = rectangle.block_ids[start : start + step]
            is_end = start + len(ids) == len(rectangle.block_ids)
            tokens = rectangle.last_block_tokens if is_end else layout.block_tokens
            size = payload_bytes(layout, len(ids), tokens, rectangle.layer_count, link.head_count)
            piece = Piece(
                seq=state.next_seq,
                first_block=rectangle.first_block + start,
                block_count=len(ids),
                layer_start=rectangle.layer_start,
                layer_count=rectangle.layer_count,
                head_start=link.head_start,
                head_count=link.head_count,
                dtype=layout.dtype,
                last_block_tokens=tokens,
                payload_bytes=size,
            )
            state.next_seq += 1
            state.unacknowledged[piece.seq] = size
            span = PoolSpan(ids, tokens, piece.layer_start, piece.layer_count, link.src_head, link.head_count)
            start += len(ids)
            yield PushPiece(link.decode_rank, piece, span)


_NOT_READING = frozenset({LinkPhase.WAITING, LinkPhase.FINISHED, LinkPhase.ENDED})
