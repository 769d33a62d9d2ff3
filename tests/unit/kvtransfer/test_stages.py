"""What the sessions note of a handoff's time, with the clock turned by hand."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.control import OpenReceive, Received, Sent
from kvtransfer.session.exports import Ready
from kvtransfer.session.piece import Piece
from kvtransfer.session.receive import ReceiveSession, ReceivingRank, ReportReceive
from kvtransfer.session.reshard import reshard_plan
from kvtransfer.session.send import PushPiece, ReportSend, SendAction, SendSession
from kvtransfer.session.ticket import Ticket
from kvtransfer.stages import ReceiveStages, SendStages, earliest, latest
from tandem.kvcache.layout import KvPoolLayout
from tandem.testing.models import FakeClock

LAYERS = 2
LAYOUT = KvPoolLayout(64, LAYERS, 4, 4, 8, "float32")
TICKET = Ticket("ab" * 16, "r", "decode-0", 2, "prefill-0", 1, 0, 2, 8, 10.0)


def pieces_of(actions: list[SendAction]) -> list[Piece]:
    return [action.piece for action in actions if isinstance(action, PushPiece)]


def sending(clock: FakeClock, decode_tp: int = 1) -> SendSession:
    return SendSession(TICKET, reshard_plan(1, decode_tp, 4), LAYOUT, clock)


def block(number: int) -> Ready:
    """All layers of one block: too little to go in parts."""
    return Ready(number, (number,), 4, 0, LAYERS)


def test_the_sender_notes_each_stage_when_it_happens() -> None:
    clock = FakeClock(50.0)
    session = sending(clock)
    clock.advance(1)  # 51
    session.stages.computing(clock.now_s())
    clock.advance(1)  # 52
    session.link_ready(0)
    session.accepted(0)
    clock.advance(1)  # 53
    (first,) = pieces_of(session.ready(block(0)))
    clock.advance(1)  # 54
    session.acknowledged(0, first.seq)
    clock.advance(1)  # 55
    (last,) = pieces_of(session.ready(block(1)))
    clock.advance(1)  # 56
    *_, report = session.acknowledged(0, last.seq)
    assert isinstance(report, ReportSend)
    assert report.message == Sent(TICKET.ticket_id, first.payload_bytes + last.payload_bytes, 2, SendStages(
        opened_at_s=50, computing_at_s=51, linked_at_s=52, first_piece_at_s=53, last_layer_at_s=55, last_ack_at_s=56,
        hidden_bytes=first.payload_bytes,
    ))  # fmt: skip


def test_what_is_acknowledged_after_the_last_layer_is_not_hidden() -> None:
    clock = FakeClock()
    session = sending(clock)
    session.link_ready(0)
    session.accepted(0)
    pieces = pieces_of([*session.ready(block(0)), *session.ready(block(1))])
    for piece in pieces:
        clock.advance(1)
        session.acknowledged(0, piece.seq)
    assert session.stages.hidden_bytes == 0
    assert session.stages.last_layer_at_s == 0


def test_pieces_that_wait_for_a_link_leave_when_it_accepts_and_the_last_link_counts() -> None:
    clock = FakeClock()
    session = sending(clock, decode_tp=2)
    session.ready(Ready(0, (0, 1), 4, 0, LAYERS))
    assert session.stages.first_piece_at_s is None
    for rank in (0, 1):
        clock.advance(1)
        session.link_ready(rank)
        session.accepted(rank)
    stages = session.stages
    assert [stages.first_piece_at_s, stages.linked_at_s] == [1, 2]
    assert session.stages.computing_at_s == 0  # nobody said so; no later than the first layer that was done


def test_the_receiver_notes_each_stage_when_it_happens() -> None:
    clock = FakeClock(50.0)
    lease = OpenReceive(TICKET.ticket_id, "prefill-0", 1, 0, (7, 9), 8)
    session = ReceiveSession(lease, ReceivingRank(0, 1, 4), LAYOUT, clock, ttl_s=10.0, digests=True)
    clock.advance(1)  # 51
    session.open_link(TICKET, 0, 1)
    sender = sending(FakeClock())
    sender.link_ready(0)
    sender.accepted(0)
    pieces = pieces_of([*sender.ready(block(0)), *sender.ready(block(1))])
    for piece in pieces:
        clock.advance(1)  # 52, 54
        session.begin_piece(0, replace(piece, digest=1))
        clock.advance(1)  # 53, 55
        session.end_piece(0, replace(piece, digest=1), 1, 0.25)
    clock.advance(1)  # 56
    (report,) = session.finish(0, len(pieces))
    assert isinstance(report, ReportReceive)
    assert isinstance(report.message, Received)
    assert report.message.stages == ReceiveStages(50, 51, 52, 55, 56)
    assert report.message.verify_s == 0.5


def test_of_several_ranks_the_first_begins_and_the_last_is_done() -> None:
    assert (earliest([3.0, None, 2.0]), latest([3.0, None, 2.0])) == (2.0, 3.0)
    assert (earliest([None]), latest([])) == (None, None)
