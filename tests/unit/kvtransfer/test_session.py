"""Both halves of a handoff joined by hand: no I/O, the clock turned by the test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.control import OpenReceive, ReceiveClosed, Received, ReceiveFailed, SendClosed, SendFailed, Sent
from kvtransfer.session.exports import Ready
from kvtransfer.session.piece import MAX_DEVICE_PIECE_BYTES, MAX_MAPPED_PIECE_BYTES, MAX_PIECE_BYTES, Piece
from kvtransfer.session.receive import (
    Acknowledge,
    ReceiveAction,
    ReceiveSession,
    ReceiveState,
    ReceivingRank,
    Refuse,
    ReportReceive,
)
from kvtransfer.session.reshard import reshard_plan
from kvtransfer.session.send import (
    Abort,
    Finish,
    Open,
    PushPiece,
    Renew,
    ReportSend,
    SendAction,
    SendSession,
    SendState,
)
from kvtransfer.session.ticket import MAX_COMPUTING_S, Ticket
from tandem.kvcache.layout import KvPoolLayout, blocks_for

LAYERS, HEADS, BLOCK_TOKENS = 2, 4, 4


class HandClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


def layout(tp: int) -> KvPoolLayout:
    return KvPoolLayout(64, LAYERS, HEADS // tp, BLOCK_TOKENS, 8, "float32")


def make_ticket(tokens: int, first_block: int = 0) -> Ticket:
    blocks = blocks_for(tokens, BLOCK_TOKENS)
    return Ticket("ab" * 16, "r", "decode-0", 2, "prefill-0", 1, first_block, blocks - first_block, tokens, 10.0)


def make_sender(ticket: Ticket, rank: int = 0, tp: int = 1, decode_tp: int = 1) -> SendSession:
    links = tuple(link for link in reshard_plan(tp, decode_tp, HEADS) if link.prefill_rank == rank)
    return SendSession(ticket, links, layout(tp), HandClock())


def make_receiver(ticket: Ticket, rank: int = 0, tp: int = 1, clock: HandClock | None = None) -> ReceiveSession:
    ids = tuple(range(10, 10 + ticket.block_count))
    lease = OpenReceive(ticket.ticket_id, "prefill-0", 1, ticket.first_block, ids, ticket.prompt_tokens)
    local = ReceivingRank(rank, tp, HEADS)
    return ReceiveSession(lease, local, layout(tp), clock or HandClock(), ttl_s=10.0, digests=True)


def ready(first: int, count: int, tokens: int, layer: int = 0, layers: int = LAYERS) -> Ready:
    last = min(BLOCK_TOKENS, tokens - (first + count - 1) * BLOCK_TOKENS)
    return Ready(first, tuple(range(first, first + count)), last, layer, layers)


@dataclass
class Wire:
    """Delivers the actions of all sessions to each other, in the order `pick` chooses among links."""

    senders: list[SendSession]
    receivers: list[ReceiveSession]
    links: dict[tuple[int, int], list[SendAction]] = field(default_factory=dict)
    reports: list[object] = field(default_factory=list)

    def do_send(self, rank: int, actions: list[SendAction]) -> None:
        for action in actions:
            if isinstance(action, ReportSend):
                self.reports.append(action.message)
            else:
                self.links.setdefault((rank, action.decode_rank), []).append(action)

    def do_receive(self, rank: int, actions: list[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case ReportReceive(message):
                    self.reports.append(message)
                case Acknowledge(prefill_rank, seq):
                    self.do_send(prefill_rank, self.senders[prefill_rank].acknowledged(rank, seq))
                case Refuse(cause, message):
                    for number, sender in enumerate(self.senders):
                        if rank in sender.decode_ranks:
                            self.do_send(number, sender.fail(cause, message))

    def step(self, pick: int) -> bool:
        busy = sorted(key for key, actions in self.links.items() if actions)
        if not busy:
            return False
        prefill_rank, decode_rank = busy[pick % len(busy)]
        action = self.links[(prefill_rank, decode_rank)].pop(0)
        sender, receiver = self.senders[prefill_rank], self.receivers[decode_rank]
        match action:
            case Open():
                receiver.open_link(sender.ticket, prefill_rank, len(self.senders))
                self.do_send(prefill_rank, sender.accepted(decode_rank))
            case PushPiece(piece=piece):
                digested = replace(piece, digest=1)
                receiver.begin_piece(prefill_rank, digested)
                self.do_receive(decode_rank, receiver.end_piece(prefill_rank, digested, 1, 0.0))
            case Finish(pieces=pieces):
                self.do_receive(decode_rank, receiver.finish(prefill_rank, pieces))
            case Abort():
                self.do_receive(decode_rank, receiver.fail(HandoffCause.CANCELLED, "aborted"))
                self.do_send(prefill_rank, sender.aborted(decode_rank))
        return True


@given(
    widths=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (4, 4)]),
    tokens=st.integers(1, 60),
    data=st.data(),
)
def test_every_order_of_events_ends_with_everything_received(
    widths: tuple[int, int], tokens: int, data: st.DataObject
) -> None:
    prefill_tp, decode_tp = widths
    blocks = blocks_for(tokens, BLOCK_TOKENS)
    ticket = make_ticket(tokens, data.draw(st.integers(0, blocks - 1), label="first block"))
    wire = Wire(
        [make_sender(ticket, rank, prefill_tp, decode_tp) for rank in range(prefill_tp)],
        [make_receiver(ticket, rank, decode_tp) for rank in range(decode_tp)],
    )
    cached = data.draw(st.integers(0, blocks - 1), label="cached blocks")
    work: list[Ready] = [ready(0, cached, tokens)] if cached else []
    work += [ready(cached, blocks - cached, tokens, layer, 1) for layer in range(LAYERS)]
    pending = [[*work] for _ in wire.senders]
    connects = [(rank, peer) for rank, sender in enumerate(wire.senders) for peer in sender.decode_ranks]
    while True:
        choices = [f"link {n}" for n in range(len(connects))] + [f"work {n}" for n, w in enumerate(pending) if w]
        choices += ["step"] if any(wire.links.values()) else []
        if not choices:
            break
        choice = data.draw(st.sampled_from(choices))
        kind, _, number = choice.partition(" ")
        if kind == "link":
            rank, peer = connects.pop(int(number))
            wire.do_send(rank, wire.senders[rank].link_ready(peer))
        elif kind == "work":
            wire.do_send(int(number), wire.senders[int(number)].ready(pending[int(number)].pop(0)))
        else:
            wire.step(data.draw(st.integers(0, 15)))
    assert [type(each) for each in wire.reports].count(Received) == decode_tp
    assert [type(each) for each in wire.reports].count(Sent) == prefill_tp
    assert all(receiver.state is ReceiveState.RECEIVED for receiver in wire.receivers)
    sent = sum(each.bytes for each in wire.reports if isinstance(each, Sent))
    received = sum(each.bytes for each in wire.reports if isinstance(each, Received))
    valid = tokens - ticket.first_block * BLOCK_TOKENS
    assert sent == received == valid * LAYERS * HEADS * 2 * 8 * 4


@given(tokens=st.integers(8, 60), when=st.integers(0, 30), by_sender=st.booleans(), data=st.data())
def test_a_close_at_any_moment_ends_both_sides_once(
    tokens: int, when: int, by_sender: bool, data: st.DataObject
) -> None:
    ticket = make_ticket(tokens)
    wire = Wire([make_sender(ticket)], [make_receiver(ticket)])
    sender, receiver = wire.senders[0], wire.receivers[0]
    wire.do_send(0, sender.link_ready(0))
    blocks = blocks_for(tokens, BLOCK_TOKENS)
    for first in range(blocks):
        wire.do_send(0, sender.ready(ready(first, 1, tokens)))
    for _ in range(when):
        wire.step(0)
    if by_sender:
        was_sent = sender.state is SendState.SENT
        wire.do_send(0, sender.close())
    else:
        was_sent = receiver.state is ReceiveState.RECEIVED
        if not was_sent:
            wire.do_receive(0, receiver.close())
    while wire.links and any(wire.links.values()):
        try:
            wire.step(data.draw(st.integers(0, 3)))
        except HandoffFault as fault:
            wire.do_send(0, sender.fail(fault.cause, fault.message))
    kinds = [type(each) for each in wire.reports]
    if by_sender:
        assert kinds.count(SendClosed) == 1
        assert sender.is_over
        assert receiver.is_over or receiver.state is ReceiveState.EXPECTING
        assert (Received in kinds) == was_sent
    elif not was_sent:
        assert kinds.count(ReceiveClosed) == 1
        assert kinds.count(SendFailed) + kinds.count(Sent) <= 1
        assert Received not in kinds


def opened(tokens: int = 13) -> tuple[SendSession, ReceiveSession, list[Piece]]:
    """A receiver with its link open, and the pieces that a correct sender would send."""
    ticket = make_ticket(tokens)
    sender, receiver = make_sender(ticket), make_receiver(ticket)
    sender.link_ready(0)
    sender.accepted(0)
    receiver.open_link(ticket, 0, 1)
    blocks = blocks_for(tokens, BLOCK_TOKENS)
    parts = (ready(0, 2, tokens), ready(2, blocks - 2, tokens))
    pushes = [push for part in parts for push in sender.ready(part)]
    return sender, receiver, [replace(push.piece, digest=5) for push in pushes if isinstance(push, PushPiece)]


def test_the_layers_of_a_short_prompt_go_in_one_piece() -> None:
    ticket = make_ticket(5)
    sender = make_sender(ticket)
    sender.link_ready(0)
    sender.accepted(0)
    assert sender.ready(ready(0, 2, 5, layer=0, layers=1)) == []
    [push] = sender.ready(ready(0, 2, 5, layer=1, layers=1))
    assert isinstance(push, PushPiece)
    assert (push.piece.layer_start, push.piece.layer_count, push.piece.block_count) == (0, LAYERS, 2)


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(MAX_PIECE_BYTES, [16] * 8), (MAX_MAPPED_PIECE_BYTES, [16, 32, 64, 16]), (MAX_DEVICE_PIECE_BYTES, [64, 64])],
)
def test_large_layers_go_as_they_finish_in_pieces_up_to_what_the_link_takes(limit: int, sizes: list[int]) -> None:
    big = KvPoolLayout(1024, LAYERS, 8, 16, 128, "float32")  # 128 KiB for each block and layer
    ticket = Ticket("ab" * 16, "r", "decode-0", 2, "prefill-0", 1, 0, 1024, 1024 * 16, 10.0)
    sender = SendSession(ticket, reshard_plan(1, 1, 8), big, HandClock())
    sender.link_ready(0, limit)
    sender.accepted(0)
    pieces = [
        push.piece for push in sender.ready(Ready(0, tuple(range(1024)), 16, 0, 1)) if isinstance(push, PushPiece)
    ]
    assert [piece.payload_bytes >> 20 for piece in pieces] == sizes
    assert [piece.first_block for piece in pieces[1:]] == [piece.end_block for piece in pieces[:-1]]
    assert (pieces[0].first_block, pieces[-1].end_block) == (0, 1024)


def test_what_was_gathered_goes_when_other_blocks_follow() -> None:
    ticket = make_ticket(13)
    sender = make_sender(ticket)
    sender.link_ready(0)
    sender.accepted(0)
    assert sender.ready(ready(0, 2, 13, layer=0, layers=1)) == []
    [push] = sender.ready(ready(2, 2, 13, layer=0, layers=1))
    assert isinstance(push, PushPiece)
    assert (push.piece.first_block, push.piece.layer_count) == (0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 0},
        {"first_block": 1},
        {"block_count": 5},
        {"layer_start": 2},
        {"layer_count": 3},
        {"head_start": 1},
        {"head_count": 5},
        {"dtype": "float16"},
        {"last_block_tokens": 4},
        {"payload_bytes": 1},
        {"digest": None},
    ],
)
def test_a_piece_that_differs_from_the_plan_is_a_protocol_fault(change: dict[str, object]) -> None:
    _, receiver, pieces = opened()
    receiver.begin_piece(0, pieces[0])
    receiver.end_piece(0, pieces[0], 5, 0.0)
    with pytest.raises(HandoffFault) as fault:
        receiver.begin_piece(0, replace(pieces[1], **change))  # type: ignore[arg-type]
    assert fault.value.cause is HandoffCause.PROTOCOL


def test_a_piece_that_is_there_already_is_a_protocol_fault() -> None:
    _, receiver, pieces = opened()
    receiver.begin_piece(0, pieces[0])
    receiver.end_piece(0, pieces[0], 5, 0.0)
    with pytest.raises(HandoffFault, match="that have arrived"):
        receiver.begin_piece(0, replace(pieces[0], seq=1))


def test_a_bad_digest_fails_the_ticket() -> None:
    _, receiver, pieces = opened()
    receiver.begin_piece(0, pieces[0])
    actions = receiver.end_piece(0, pieces[0], 6, 0.0)
    assert [type(action) for action in actions] == [Refuse, ReportReceive]
    assert receiver.state is ReceiveState.FAILED


def test_finishing_early_is_incomplete() -> None:
    _, receiver, pieces = opened()
    receiver.begin_piece(0, pieces[0])
    receiver.end_piece(0, pieces[0], 5, 0.0)
    report = receiver.finish(0, 1)[-1]
    assert isinstance(report, ReportReceive)
    assert isinstance(report.message, ReceiveFailed)
    assert report.message.cause == "incomplete"


def test_the_end_is_reported_only_when_no_write_is_under_way() -> None:
    _, receiver, pieces = opened()
    receiver.begin_piece(0, pieces[0])
    assert [type(action) for action in receiver.close()] == [Refuse]
    assert receiver.state is ReceiveState.CLOSING
    [report] = receiver.end_piece(0, pieces[0], 5, 0.0)
    assert report == ReportReceive(ReceiveClosed("ab" * 16))
    with pytest.raises(HandoffFault):
        receiver.begin_piece(0, pieces[1])


def test_progress_renews_the_lease_and_silence_ends_it() -> None:
    clock = HandClock()
    ticket = make_ticket(13)
    receiver = make_receiver(ticket, clock=clock)
    clock.time_s += 9.0
    receiver.open_link(ticket, 0, 1)
    clock.time_s += 9.0
    assert receiver.tick() == []
    clock.time_s += 2.0
    report = receiver.tick()[-1]
    assert isinstance(report, ReportReceive)
    assert isinstance(report.message, ReceiveFailed)
    assert report.message.cause == "deadline"


def test_a_prompt_that_is_still_computed_renews_both_ends_for_a_while() -> None:
    ticket, clock = make_ticket(13), HandClock()
    links = reshard_plan(1, 1, HEADS)
    sender, receiver = SendSession(ticket, links, layout(1), clock), make_receiver(ticket, clock=clock)
    assert sender.still_computing() == [], "no link takes this ticket yet"
    sender.link_ready(0)
    receiver.open_link(ticket, 0, 1)
    sender.accepted(0)
    waited_s = 0.0
    while waited_s < MAX_COMPUTING_S:
        clock.time_s += 9.0
        waited_s += 9.0
        assert sender.tick() == []
        assert receiver.tick() == []
        for renewed in sender.still_computing():
            assert renewed == Renew(0)
            receiver.still_computing()
    clock.time_s += 9.0
    assert sender.still_computing() == []
    receiver.still_computing()
    clock.time_s += 2.0
    assert sender.tick(), "then only progress counts"
    assert receiver.tick()


def test_a_prompt_that_is_computed_has_no_excuse() -> None:
    sender, _, _ = opened()
    assert sender.still_computing() == []


def test_a_late_or_foreign_link_is_refused() -> None:
    _, receiver, _ = opened()
    with pytest.raises(HandoffFault):
        receiver.open_link(make_ticket(13), 0, 1)  # a second link of the same rank
    fresh = make_receiver(make_ticket(13))
    with pytest.raises(HandoffFault) as stale:
        fresh.open_link(replace(make_ticket(13), prefill_epoch=9), 0, 1)
    assert stale.value.cause is HandoffCause.STALE_EPOCH
    fresh.close()
    with pytest.raises(HandoffFault) as refused:
        fresh.open_link(make_ticket(13), 0, 1)
    assert refused.value.cause is HandoffCause.REFUSED_TICKET


def test_a_rank_without_links_has_nothing_to_send() -> None:
    sender = SendSession(make_ticket(13), (), layout(1), HandClock())
    assert sender.start() == [ReportSend(Sent("ab" * 16, 0, 0))]


def test_half_a_block_in_mid_prompt_waits_until_it_is_full() -> None:
    sender = make_sender(make_ticket(16))
    sender.link_ready(0)
    sender.accepted(0)
    first = sender.ready(Ready(0, (0, 1), 2, 0, LAYERS))
    assert [push.piece.block_count for push in first if isinstance(push, PushPiece)] == [1]
    rest = sender.ready(Ready(1, (1, 2, 3), 4, 0, LAYERS))
    assert [(push.piece.first_block, push.piece.block_count) for push in rest if isinstance(push, PushPiece)] == [
        (1, 3)
    ]


def test_blocks_that_are_computed_again_are_not_sent_again() -> None:
    sender = make_sender(make_ticket(16))
    sender.link_ready(0)
    sender.accepted(0)
    sender.ready(ready(0, 2, 16))
    again = sender.ready(ready(0, 4, 16))
    cells = {(push.piece.first_block, push.piece.layer_start) for push in again if isinstance(push, PushPiece)}
    assert cells == {(2, 0), (2, 1), (3, 0), (3, 1)}


def test_an_unknown_acknowledgement_fails_the_send() -> None:
    sender, _, _ = opened()
    actions = sender.acknowledged(0, 99)
    assert isinstance(actions[-1], ReportSend)
    assert isinstance(actions[-1].message, SendFailed)


def test_a_send_closes_when_the_receiver_answers_dies_or_stays_silent() -> None:
    answered, _, _ = opened()
    assert answered.close() == [Abort(0)]
    assert answered.aborted(0) == [ReportSend(SendClosed("ab" * 16))]
    died, _, _ = opened()
    died.close()
    assert died.link_down(0, HandoffCause.PEER_LOST, "gone", final=False) == [ReportSend(SendClosed("ab" * 16))]
    clock = HandClock()
    silent = SendSession(make_ticket(13), reshard_plan(1, 1, HEADS), layout(1), clock)
    silent.link_ready(0)
    silent.close()
    assert silent.tick() == []
    clock.time_s += 11.0
    assert silent.tick() == [ReportSend(SendClosed("ab" * 16))]


def test_a_link_that_never_carried_the_ticket_may_come_back() -> None:
    sender = make_sender(make_ticket(13))
    assert sender.link_down(0, HandoffCause.PEER_LOST, "not yet", final=False) == []
    assert sender.link_ready(0) == [Open(0)]
    refused = make_sender(make_ticket(13))
    assert refused.link_down(0, HandoffCause.TRANSPORT, "never", final=True) != []
    assert refused.state is SendState.FAILED
