"""The prefill side's book of handoffs: blocks stay leased while an agent might read them."""

from kvtransfer.control import Sent
from worker.outbound_handoffs import OutboundHandoffs


def sent(ticket_id: str) -> Sent:
    return Sent(ticket_id=ticket_id, bytes=10, pieces=1)


def test_released_when_every_rank_was_acknowledged() -> None:
    book = OutboundHandoffs(tp=2)
    entry = book.open("t", "1:r", 0.0)
    assert book.sent(1, sent("t")) is None
    assert book.sent(1, sent("t")) is None
    assert book.sent(0, sent("t")) is entry
    assert (entry.sent_bytes, entry.pieces) == (20, 2)
    assert book.by_ticket("t") is None


def test_closing_waits_for_every_rank_even_for_those_that_had_sent() -> None:
    book = OutboundHandoffs(tp=2)
    entry = book.open("t", "1:r", 0.0)
    book.sent(0, sent("t"))
    assert book.start_closing(entry)
    assert book.sent(1, sent("t")) is None
    assert book.closed(1, "t") is None
    assert book.closed(0, "t") is entry


def test_unknown_tickets_change_nothing() -> None:
    book = OutboundHandoffs(tp=1)
    assert book.sent(0, sent("nobody")) is None
    assert book.closed(0, "nobody") is None
