from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.pool.pool import payload_bytes
from kvtransfer.session.piece import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameType,
    Header,
    Piece,
    check_size,
    failure_body,
    parse_failure,
)
from kvtransfer.transports.factory import max_piece_bytes
from tandem.kvcache.layout import KvPoolLayout

LAYOUT = KvPoolLayout(8, 2, 2, 4, 8, "float32")
U16, U32, U64 = st.integers(1, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
pieces = st.builds(
    Piece,
    seq=U32,
    first_block=U32,
    block_count=st.integers(1, MAX_BODY_BYTES // 4),
    layer_start=U16,
    layer_count=U16,
    head_start=U16,
    head_count=U16,
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "float8_e4m3"]),
    last_block_tokens=U16,
    payload_bytes=U64,
    digest=st.none() | U64,
)
TICKET_IDS = st.binary(min_size=16, max_size=16).map(bytes.hex)


def good_piece() -> Piece:
    return Piece(0, 0, 2, 0, 2, 0, 2, "float32", 3, payload_bytes(LAYOUT, 2, 3, 2, 2))


@given(TICKET_IDS, pieces, st.integers(0, MAX_BODY_BYTES))
def test_a_piece_survives_the_wire(ticket_id: str, piece: Piece, body_bytes: int) -> None:
    header = Header(FrameType.PIECE, ticket_id, seq=piece.seq, piece=piece, digest=piece.digest, body_bytes=body_bytes)
    assert Header.unpack(header.pack()) == header


@given(st.sampled_from([t for t in FrameType if t is not FrameType.PIECE]), TICKET_IDS, U32, st.none() | U64)
def test_other_frames_survive_the_wire(kind: FrameType, ticket_id: str, seq: int, digest: int | None) -> None:
    header = Header(kind, ticket_id, seq=seq, digest=digest)
    assert Header.unpack(header.pack()) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.binary(max_size=200))
def test_noise_is_refused_or_within_limits(noise: bytes) -> None:
    cause = None
    body_bytes = 0
    try:
        body_bytes = Header.unpack(noise).body_bytes
    except HandoffFault as fault:
        cause = fault.cause
    assert cause in (None, HandoffCause.PROTOCOL)
    assert body_bytes <= MAX_BODY_BYTES


def test_a_good_piece_has_the_size_its_rectangle_says() -> None:
    check_size(good_piece(), LAYOUT, 2)
    assert good_piece().payload_bytes == (4 + 3) * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"payload_bytes": 2**63},
        {"block_count": 9},
        {"layer_start": 1},
        {"head_count": 3},
        {"last_block_tokens": 5},
    ],
)
def test_a_piece_that_does_not_fit_is_refused_before_anything_is_allocated(change: dict[str, object]) -> None:
    with pytest.raises(HandoffFault):
        check_size(replace(good_piece(), **change), LAYOUT, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "fits"), [(max_piece_bytes("mapped", 2), True), (max_piece_bytes("mapped", 1), False),
                        (max_piece_bytes("tcp", 2), False)]
)  # fmt: skip
def test_only_a_link_that_carries_no_bytes_takes_large_pieces(limit: int, fits: bool) -> None:
    big = KvPoolLayout(1024, 2, 8, 16, 128, "float32")
    piece = Piece(0, 0, 128, 0, 2, 0, 8, "float32", 16, 32 << 20)
    if fits:
        check_size(piece, big, 8, max_bytes=limit)
    else:
        with pytest.raises(HandoffFault, match="at most 16777216 bytes"):
            check_size(piece, big, 8, max_bytes=limit)


def test_a_failure_keeps_its_cause() -> None:
    fault = parse_failure(failure_body(HandoffCause.DEADLINE, "too slow"))
    assert (fault.cause, fault.message) == (HandoffCause.DEADLINE, "too slow")
    assert parse_failure(b"\xff\xfe nonsense").cause is HandoffCause.PROTOCOL


@given(TICKET_IDS, pieces, st.integers(0, 8 * HEADER_BYTES - 1), st.sampled_from([1, 2]))
def test_a_header_that_was_changed_does_not_fit_its_payload(
    ticket_id: str, piece: Piece, bit: int, version: int
) -> None:
    header = Header(FrameType.PIECE, ticket_id, seq=piece.seq, piece=replace(piece, digest=77), digest=77)
    raw = bytearray(header.pack(version))
    raw[bit // 8] ^= 1 << (bit % 8)
    try:
        found = Header.unpack(bytes(raw))
    except HandoffFault:
        return
    noticed = found.type is not FrameType.PIECE or found.digest != 77 or raw[0] != version
    assert noticed or version < 2 or found == header


@given(st.sampled_from([FrameType.ACK, FrameType.OPEN, FrameType.FINISH]), TICKET_IDS, U32, st.integers(0, 8 * 80 - 1))
def test_a_frame_without_a_payload_that_was_changed_is_refused(
    kind: FrameType, ticket_id: str, seq: int, bit: int
) -> None:
    raw = bytearray(Header(kind, ticket_id, seq=seq).pack())
    raw[bit // 8] ^= 1 << (bit % 8)
    try:
        found = Header.unpack(bytes(raw))
    except HandoffFault:
        return
    assert found.digest is not None, "only a frame that now claims a digest may pass, and nothing fits that"
