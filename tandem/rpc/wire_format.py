"""Joins serialized protobuf messages without parsing them.

To append the bytes of fields to a serialized message is to set them, or to add to them if they are repeated
(https://protobuf.dev/programming-guides/encoding/#last-one-wins).
"""

from __future__ import annotations

_LEN = 2  # wire type of a field that begins with its length


def message_field(number: int, raw: bytes) -> bytes:
    """The bytes of a field that holds a serialized message: key, length, content."""
    return _varint(number << 3 | _LEN) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; all bytes but the last have their highest bit set."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
