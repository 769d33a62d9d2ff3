from __future__ import annotations

import dataclasses
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.session.ticket import Ticket, ticket_id_of
from tandem.errors import InputError

KEY = bytes(range(32))
TICKET = Ticket("ab" * 16, "request-1", "decode-0", 7, "prefill-0", 9, 2, 5, 100, 30.0)

tickets = st.builds(
    Ticket,
    ticket_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    request_id=st.text(max_size=60),
    decode_worker=st.text(max_size=60),
    decode_epoch=st.integers(0, 2**64 - 1),
    prefill_worker=st.text(max_size=60),
    prefill_epoch=st.integers(0, 2**64 - 1),
    first_block=st.integers(0, 2**32 - 1),
    block_count=st.integers(0, 2**32 - 1),
    prompt_tokens=st.integers(0, 2**32 - 1),
    ttl_s=st.floats(0.001, 3600.0),
)


@given(tickets)
def test_what_was_signed_is_what_verifies(ticket: Ticket) -> None:
    signed = ticket.sign(KEY)
    assert Ticket.verify(KEY, signed) == ticket
    assert ticket_id_of(signed) == ticket.ticket_id


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, flip: int) -> None:
    signed = bytearray(TICKET.sign(KEY))
    signed[position % len(signed)] ^= flip
    with pytest.raises((HandoffFault, InputError)):
        Ticket.verify(KEY, bytes(signed))


def test_another_epochs_key_is_refused() -> None:
    with pytest.raises(HandoffFault) as refusal:
        Ticket.verify(secrets.token_bytes(32), TICKET.sign(KEY))
    assert refusal.value.cause is HandoffCause.REFUSED_TICKET


@given(st.binary(max_size=3000))
def test_noise_is_no_ticket(noise: bytes) -> None:
    with pytest.raises(InputError):
        Ticket.verify(KEY, noise)


@pytest.mark.parametrize(
    "change",
    [
        {"ticket_id": "AB" * 16},
        {"ticket_id": "ab"},
        {"decode_epoch": -1},
        {"prompt_tokens": 2**32},
        {"ttl_s": 0.0},
        {"ttl_s": float("nan")},
        {"request_id": "x" * 600},
    ],
)
def test_a_ticket_out_of_range_cannot_be_made(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        dataclasses.replace(TICKET, **change)  # type: ignore[arg-type]


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(InputError):
        TICKET.sign(b"short")
