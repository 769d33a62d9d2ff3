"""A ticket permits filling certain KV blocks on a decode worker for one request. That worker creates, signs and
verifies it.

Format: a fixed little-endian header, three length-prefixed UTF-8 names, then HMAC-SHA256 over the preceding bytes. Each
ticket has exactly one encoding. The key is 32 random bytes, different in each epoch, and never leaves the decode
worker.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import struct
from dataclasses import dataclass

from kvtransfer.causes import HandoffCause, HandoffFault
from tandem.errors import InputError

KEY_BYTES = 32
MAX_SIGNED_BYTES = 2048
MAX_TTL_S = 3600.0
MAX_COMPUTING_S = 600.0  # a prompt that is still computed renews its lease so long; then only progress does
_MAGIC = b"TKT1"
_HEAD = struct.Struct("<4s16sQQIIId")
_LENGTH = struct.Struct("<H")
_MAC_BYTES = hashlib.sha256().digest_size
_MAX_NAME_BYTES = 512
_TICKET_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to write logical blocks [first_block, first_block + block_count) of a prompt.

    `ticket_id` is 128 random bits in hex. A lease without progress ends after `ttl_s`.

    Raises:
        InputError: a field is out of range.
    """

    ticket_id: str
    request_id: str
    decode_worker: str
    decode_epoch: int
    prefill_worker: str
    prefill_epoch: int
    first_block: int
    block_count: int
    prompt_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        if not _TICKET_ID.fullmatch(self.ticket_id):
            raise InputError("ticket_id: expected 32 lower-case hex digits", field="ticket_id")
        for name in ("decode_epoch", "prefill_epoch"):
            _check_range(name, getattr(self, name), 1 << 64)
        for name in ("first_block", "block_count", "prompt_tokens"):
            _check_range(name, getattr(self, name), 1 << 32)
        if not (math.isfinite(self.ttl_s) and 0 < self.ttl_s <= MAX_TTL_S):
            raise InputError(f"ttl_s: expected 0 < ttl_s <= {MAX_TTL_S:g}, got {self.ttl_s}", field="ttl_s")
        for name in ("request_id", "decode_worker", "prefill_worker"):
            if len(getattr(self, name).encode()) > _MAX_NAME_BYTES:
                raise InputError(f"{name}: expected at most {_MAX_NAME_BYTES} bytes", field=name)

    @property
    def end_block(self) -> int:
        return self.first_block + self.block_count

    def sign(self, key: bytes) -> bytes:
        """Raises InputError if the key has the wrong length."""
        body = _HEAD.pack(
            _MAGIC,
            bytes.fromhex(self.ticket_id),
            self.decode_epoch,
            self.prefill_epoch,
            self.first_block,
            self.block_count,
            self.prompt_tokens,
            self.ttl_s,
        ) + b"".join(_name(text) for text in (self.request_id, self.decode_worker, self.prefill_worker))
        return body + _mac(key, body)

    @classmethod
    def verify(cls, key: bytes, signed: bytes) -> Ticket:
        """The ticket in `signed`, if `key` signed it.

        Raises:
            InputError: not a ticket.
            HandoffFault: (refused_ticket) signed with another key, or changed.
        """
        ticket = cls.parse(signed)
        if not hmac.compare_digest(_mac(key, signed[:-_MAC_BYTES]), signed[-_MAC_BYTES:]):
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "ticket: expected one signed by this worker's epoch")
        return ticket

    @classmethod
    def parse(cls, signed: bytes) -> Ticket:
        """Parses a ticket without verification, for the sending side, which lacks the key.

        Raises:
            InputError: not a ticket.
        """
        if not _HEAD.size + _MAC_BYTES <= len(signed) <= MAX_SIGNED_BYTES or signed[:4] != _MAGIC:
            raise InputError("ticket: expected a signed ticket", field="ticket")
        _, raw_id, decode_epoch, prefill_epoch, first, count, tokens, ttl_s = _HEAD.unpack_from(signed)
        names: list[str] = []
        rest = signed[_HEAD.size : -_MAC_BYTES]
        for _ in range(3):
            text, rest = _take_name(rest)
            names.append(text)
        if rest:
            raise InputError("ticket: expected nothing after its names", field="ticket")
        return cls(raw_id.hex(), names[0], names[1], decode_epoch, names[2], prefill_epoch, first, count, tokens, ttl_s)


def ticket_id_of(signed: bytes) -> str:
    """The id in a signed ticket, without verification. Raises InputError if it is not a ticket."""
    return Ticket.parse(signed).ticket_id


def _check_range(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise InputError(f"{name}: expected 0 <= {name} < {limit}, got {value}", field=name)


def _mac(key: bytes, body: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InputError(f"ticket key: expected {KEY_BYTES} bytes, got {len(key)}")
    return hmac.digest(key, body, "sha256")


def _name(text: str) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


def _take_name(rest: bytes) -> tuple[str, bytes]:
    if len(rest) < _LENGTH.size:
        raise InputError("ticket: truncated", field="ticket")
    (length,) = _LENGTH.unpack_from(rest)
    end = _LENGTH.size + length
    if length > _MAX_NAME_BYTES or len(rest) < end:
        raise InputError("ticket: a name is too long or truncated", field="ticket")
    try:
        return rest[_LENGTH.size : end].decode(), rest[end:]
    except UnicodeDecodeError as error:
        raise InputError("ticket: a name is not UTF-8", field="ticket") from error
