"""Limits of a protobuf message, checked before it is decoded: two bytes can become a submessage of 100 bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tandem.errors import InputError

MAX_FIELDS = 1 << 15  # including those of submessages
MAX_DEPTH = 100  # of messages in messages, as protobuf's own limit
MAX_PACKED = 1 << 20  # numbers in packed fields, mostly token ids
_SMALL_BYTES = 16 << 10  # a smaller message is harmless whatever its content

_Field = Descriptor | None  # the submessage of a length-delimited field; None: packed numbers
Decoded = TypeVar("Decoded", bound=Message)


class _Wire(IntEnum):
    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


def decoder(kind: type[Decoded]) -> Callable[[bytes], Decoded]:
    """A function that decodes within the limits. It raises InputError."""

    def decode(data: bytes) -> Decoded:
        if len(data) > _SMALL_BYTES:
            _Walk(data).message(0, len(data), cast(Descriptor, kind.DESCRIPTOR))
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise InputError(f"message: expected a {kind.DESCRIPTOR.full_name}: {error}") from None

    return decode


class _Walk:
    """Counts fields and numbers. It leaves a length beyond the end to the decoder, which names that fault better."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = self._packed = 0

    def message(self, at: int, end: int, kind: Descriptor, depth: int = 1) -> None:
        if depth > MAX_DEPTH:
            raise InputError(f"message: expected at most {MAX_DEPTH} messages in each other")
        fields = _fields(kind)
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise InputError(f"message: expected at most {MAX_FIELDS} fields, including those of submessages")
            tag, at = self._varint(at, end)
            match tag & 7:
                case _Wire.VARINT:
                    _, at = self._varint(at, end)
                case _Wire.FIXED64:
                    at += 8
                case _Wire.FIXED32:
                    at += 4
                case _Wire.BYTES:
                    size, at = self._varint(at, end)
                    stop = min(end, at + size)
                    if tag >> 3 in fields:
                        self._part(at, stop, fields[tag >> 3], depth)
                    at = stop
                case _:
                    raise InputError("message: expected no groups")

    def _part(self, at: int, end: int, field: _Field, depth: int) -> None:
        if field is not None:
            self.message(at, end, field, depth + 1)
            return
        # The last byte of each varint has its high bit clear. Numbers of fixed size are overcounted up to eightfold.
        self._packed += int(np.count_nonzero(np.frombuffer(self._data, np.uint8, end - at, at) < 0x80))
        if self._packed > MAX_PACKED:
            raise InputError(f"message: expected at most {MAX_PACKED} numbers")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise InputError("message: expected complete varints")


@cache
def _fields(kind: Descriptor) -> dict[int, _Field]:
    """The length-delimited fields that contain submessages or packed numbers, by field number."""
    return {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type is not None or (field.is_repeated and field.type not in _TEXT)
    }


_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
