"""The decode side's book of handoffs: what may be joined, and when blocks may be freed."""

import pytest

from decode_worker.inbound_handoffs import InboundHandoffs, InboundPhase
from kvtransfer.control import Received
from tandem.errors import InternalError
from tandem.testing.models import FakeClock


def received(ticket_id: str) -> Received:
    return Received(ticket_id=ticket_id, bytes=100, blocks=2, pieces=3, verify_s=0.5, transports=("mapped",))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def book(clock: FakeClock) -> InboundHandoffs:
    return InboundHandoffs(clock, tp=2, ttl_s=30.0)


def test_joins_only_when_every_rank_received_and_the_first_token_is_known(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    book.received(0, received("t"))
    assert not entry.can_join
    book.received(1, received("t"))
    assert entry.phase is InboundPhase.VERIFIED
    assert not entry.can_join
    entry.first_token = 7
    assert entry.can_join
    book.joined(entry)
    assert book.by_engine_id("1:r") is None


def test_the_first_token_may_come_before_the_blocks(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    entry.first_token = 7
    book.received(0, received("t"))
    assert not entry.can_join
    book.received(1, received("t"))
    assert entry.can_join


def test_a_rank_that_reports_twice_counts_once(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    assert book.received(0, received("t")) is entry
    assert book.received(0, received("t")) is None
    assert entry.phase is InboundPhase.EXPECTING
    assert entry.received_bytes == 100


def test_a_fully_cached_prompt_waits_for_nothing_but_its_first_token(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=False, taken_up_at_s=0.0)
    assert entry.phase is InboundPhase.VERIFIED
    entry.first_token = 1
    assert entry.can_join


def test_blocks_are_freed_only_when_every_rank_closed(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    book.received(0, received("t"))
    assert book.start_closing(entry)
    assert not book.start_closing(entry)
    assert book.closed(0, "t") is None
    assert book.closed(1, "t") is entry
    assert book.by_ticket("t") is None


def test_nothing_that_is_closing_can_be_received_or_joined(book: InboundHandoffs) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    book.start_closing(entry)
    assert book.received(0, received("t")) is None
    entry.first_token = 7
    with pytest.raises(InternalError, match="closing"):
        book.joined(entry)


def test_a_first_token_that_never_comes_makes_the_handoff_late(book: InboundHandoffs, clock: FakeClock) -> None:
    entry = book.open("t", "1:r", anything_to_receive=True, taken_up_at_s=0.0)
    clock.advance(100.0)
    assert book.late() == []  # while blocks are expected the agents watch the time
    book.received(0, received("t"))
    book.received(1, received("t"))
    clock.advance(29.0)
    assert book.late() == []
    clock.advance(2.0)
    assert book.late() == [entry]
