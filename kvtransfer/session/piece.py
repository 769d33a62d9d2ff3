"""The frames of a link: a fixed binary header and a bounded body. Never an address, a pickle or an object.

A *piece* is a rectangle of KV: logical blocks × layers × heads, K and V. Its last block may be partial. Limits are
checked before memory is allocated. Little-endian, 80 bytes:

    version u8 · type u8 · dtype u8 · flags u8 · ticket id 16 · seq u32 · first block u32 · block count u32 ·
    layer start u16, count u16 · head start u16, count u16 · last block's tokens u16 · 0 u16 · payload u64 ·
    digest u64 · body u32 · 0 ×16

From version 2 the digest field is the payload's digest (0 without one) xor the digest of the rest of the header, so a
changed header no longer matches its payload.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.pool.pool import payload_bytes
from kvtransfer.pool.quantise import INT8, quantised_bytes
from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, binds_address
from tandem.kvcache.layout import KvPoolLayout

MAX_BODY_BYTES = 1 << 20
MAX_PIECE_BYTES = 16 << 20  # senders split larger requests, so tickets share the link and digests overlap copies
MAX_MAPPED_PIECE_BYTES = 64 << 20  # copied within 10 ms
MAX_DEVICE_PIECE_BYTES = 256 << 20  # copied within 0.3 ms in a GPU's memory, by one launch of about 10 µs
MIN_PIECE_BYTES = 1 << 20  # layers are gathered up to this size; a piece costs each side about 100 µs
MAX_PIECE_BLOCKS = MAX_BODY_BYTES // 4
NO_TICKET = "0" * 32
_HEADER = struct.Struct("<BBBB16sIIIHHHHHHQQI16x")
HEADER_BYTES = _HEADER.size
_DIGEST_AT = struct.calcsize("<BBBB16sIIIHHHHHHQ")
_DIGEST = struct.Struct("<Q")
_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3")
_HAS_DIGEST = 1


class FrameType(IntEnum):
    # sender to receiver
    OPEN = 1  # body: the signed ticket
    PIECE = 2  # body: what the transport adds (mapped: the sender's physical blocks, u32 each)
    FINISH = 3  # all pieces acknowledged, blocks still owned by the ticket; seq: number of pieces
    ABORT = 4
    PROBE = 5
    IDLE = 7  # the sender closes the link until it needs it again; no ticket uses it
    DIGEST = 6  # xor the announced number; for pieces whose digest follows, in order
    # receiver to sender
    ACCEPT = 16
    ACK = 17
    FAIL = 18  # body: cause, newline, message
    ABORTED = 19
    PROBED = 20
    # either way
    HEARTBEAT = 32  # from the sender with a ticket: its prompt is still computed (earlier releases ignore that)


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads are the model's, blocks the prompt's logical ones. Only `last_block_tokens` tokens of the last block are
    valid."""

    seq: int
    first_block: int
    block_count: int
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    dtype: str
    last_block_tokens: int
    payload_bytes: int
    digest: int | None = None

    @property
    def end_block(self) -> int:
        return self.first_block + self.block_count


@dataclass(frozen=True, slots=True)
class Header:
    """`seq` is the piece's number, the acknowledged piece, or the number of pieces. `digest` is that of a PROBED
    frame."""

    type: FrameType
    ticket_id: str = NO_TICKET
    seq: int = 0
    piece: Piece | None = None
    digest: int | None = None
    body_bytes: int = 0

    def pack(self, version: int = PROTOCOL_VERSION) -> bytes:
        piece = self.piece or _NO_PIECE
        digest = piece.digest if self.piece else self.digest
        raw = bytearray(_HEADER.size)
        _HEADER.pack_into(
            raw,
            0,
            version,
            self.type,
            _DTYPES.index(piece.dtype),
            0 if digest is None else _HAS_DIGEST,
            bytes.fromhex(self.ticket_id),
            piece.seq if self.piece else self.seq,
            piece.first_block,
            piece.block_count,
            piece.layer_start,
            piece.layer_count,
            piece.head_start,
            piece.head_count,
            piece.last_block_tokens,
            0,
            piece.payload_bytes,
            0,
            self.body_bytes,
        )
        _DIGEST.pack_into(raw, _DIGEST_AT, (digest or 0) ^ _address_digest(raw))
        return bytes(raw)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Raises HandoffFault (protocol) for an invalid header, an unsupported version or an exceeded limit."""
        if len(raw) != HEADER_BYTES:
            raise protocol_fault(f"frame: expected a header of {HEADER_BYTES} bytes, got {len(raw)}")
        version, kind, dtype, flags, ticket, seq, *numbers, payload_bytes, digest, body_bytes = _HEADER.unpack(raw)
        if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
            raise protocol_fault(f"frame: expected protocol version {PROTOCOL_VERSION}, got {version}")
        if body_bytes > MAX_BODY_BYTES:
            raise protocol_fault(f"frame: expected a body of at most {MAX_BODY_BYTES} bytes, got {body_bytes}")
        if dtype >= len(_DTYPES) or flags & ~_HAS_DIGEST:
            raise protocol_fault(f"frame: unknown dtype {dtype} or flags {flags}")
        try:
            frame_type = FrameType(kind)
        except ValueError as error:
            raise protocol_fault(f"frame: unknown type {kind}") from error
        digest ^= _address_digest(raw)
        found = digest if flags & _HAS_DIGEST else None
        if found is None and digest:
            raise protocol_fault("frame: the header was changed in transit")
        piece = None
        if frame_type is FrameType.PIECE:
            first, count, layer_start, layer_count, head_start, head_count, last, _ = numbers
            if not 0 < count <= MAX_PIECE_BLOCKS or not layer_count or not head_count or not last:
                raise protocol_fault("frame: expected a piece with blocks, layers, heads and tokens within the limits")
            piece = Piece(
                seq, first, count, layer_start, layer_count, head_start, head_count,
                _DTYPES[dtype], last, payload_bytes, found,
            )  # fmt: skip
        return cls(frame_type, ticket.hex(), seq, piece, found, body_bytes)


def _address_digest(raw: bytes | bytearray) -> int:
    """The digest of a packed header, with its digest field as zero."""
    if not binds_address(raw[0]):
        return 0
    bare = bytearray(raw)
    _DIGEST.pack_into(bare, _DIGEST_AT, 0)
    return int(xxhash.xxh3_64_intdigest(bytes(bare)))


_NO_PIECE = Piece(0, 0, 0, 0, 0, 0, 0, _DTYPES[0], 0, 0)


def check_size(
    piece: Piece, layout: KvPoolLayout, head_count: int, *, int8: bool = False, max_bytes: int = MAX_PIECE_BYTES
) -> None:
    """Checks a piece before memory is allocated: its size matches its rectangle, within the pool and the limits.

    Raises:
        HandoffFault: (protocol)
    """
    dtype = INT8 if int8 else layout.dtype
    if piece.dtype != dtype:
        raise protocol_fault(f"piece: expected dtype {dtype}, got {piece.dtype}")
    if (
        piece.block_count > layout.num_blocks
        or piece.layer_start + piece.layer_count > layout.layers
        or piece.head_count > head_count
        or piece.last_block_tokens > layout.block_tokens
    ):
        raise protocol_fault("piece: expected blocks, layers, heads and tokens within the pool")
    expected = payload_bytes(layout, piece.block_count, piece.last_block_tokens, piece.layer_count, piece.head_count)
    if int8:
        expected = quantised_bytes(expected, layout)
    if piece.payload_bytes != expected:
        raise protocol_fault(f"piece: expected {expected} bytes for its rectangle, got {piece.payload_bytes}")
    limit = max(max_bytes, layout.block_bytes)
    if expected > limit:
        raise protocol_fault(f"piece: expected at most {limit} bytes, got {expected}")


def as_int8(piece: Piece, layout: KvPoolLayout) -> Piece:
    """The piece as announced on a link that carries int8."""
    return replace(piece, dtype=INT8, payload_bytes=quantised_bytes(piece.payload_bytes, layout))


def as_in_pool(piece: Piece, layout: KvPoolLayout) -> Piece:
    """The piece in the pool's dtype, as sessions use it. Its size was checked."""
    tokens = piece.last_block_tokens
    size = payload_bytes(layout, piece.block_count, tokens, piece.layer_count, piece.head_count)
    return replace(piece, dtype=layout.dtype, payload_bytes=size)


def failure_body(cause: HandoffCause, message: str) -> bytes:
    return f"{cause}\n{message[:500]}".encode()


def parse_failure(body: bytes) -> HandoffFault:
    """Parses the body of a FAIL frame. An unknown cause, from a newer peer, becomes `protocol`."""
    name, _, message = body.decode(errors="replace").partition("\n")
    try:
        cause = HandoffCause(name)
    except ValueError:
        return protocol_fault(f"the receiver failed with unknown cause {name!r}: {message}")
    return HandoffFault(cause, message)
