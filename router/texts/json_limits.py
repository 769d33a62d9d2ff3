"""Limits of JSON, of a body and of the texts within it, checked before objects are built from it.

A body grows when it is parsed: two bytes become a list of 56 bytes, and a million of them take seconds under the
interpreter lock, which stall the event loop from any thread. Counting takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import InputError

_BLOCK_BYTES = 64 << 10  # counted at a time; fits a core's cache
_NO_MARKS = bytes(set(range(256)) - set(b'[{:,"'))


@dataclass(frozen=True, slots=True)
class JsonLimits:
    containers: int = 1 << 15  # objects and lists: eight for each of 4096 messages
    keys: int = 1 << 15
    strings: int = 1 << 16  # including keys
    values: int = 1 << 19  # mostly token ids


DEFAULT_LIMITS = JsonLimits()


def check_body(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> None:
    """Raises InputError. Takes less than 1 ms per MB, and more if strings are full of brackets and commas.

    Invalid JSON may pass: the parser stops at its first fault.
    """
    if (fault := _first_fault([body], limits)) is not None:
        raise InputError(f"body: {fault[1]}; send less")


def check_texts(texts: Sequence[tuple[str, str]], limits: JsonLimits = DEFAULT_LIMITS) -> None:
    """As `check_body`, of the JSON texts of one request, which count together: many small ones cost as much as a large
    one. `texts`: each after the client's field of it. Raises InputError with the field that exceeds a limit."""
    if (fault := _first_fault([text.encode() for _, text in texts], limits)) is not None:
        field = texts[fault[0]][0]
        raise InputError(f"{field}: {fault[1]}; send less", field=field)


@dataclass(slots=True)
class _Marks:
    opened: int = 0
    colons: int = 0
    quotes: int = 0
    commas: int = 0

    def add(self, marks: bytes) -> None:
        """All but quotes."""
        self.opened += marks.count(b"[") + marks.count(b"{")
        self.colons += marks.count(b":")
        self.commas += marks.count(b",")

    def fault(self, limits: JsonLimits) -> str | None:
        checks = (
            ("objects and lists", self.opened, limits.containers),
            ("keys", self.colons, limits.keys),
            ("strings", self.quotes // 2, limits.strings),
            ("values", self.commas + self.opened, limits.values),
        )
        return next((f"expected at most {most} {what}" for what, count, most in checks if count > most), None)


def _first_fault(texts: Sequence[bytes], limits: JsonLimits) -> tuple[int, str] | None:
    """The number of the text that exceeds a limit, and how."""
    if sum(map(len, texts)) <= limits.containers:
        return None
    most = _Marks()  # an upper bound, as it includes marks within strings
    for text in texts:
        marks = text.translate(None, _NO_MARKS)
        most.add(marks)
        most.quotes += marks.count(b'"')
    if most.fault(limits) is None:
        return None
    found = _Marks()
    for number, text in enumerate(texts):
        for marks, quotes in _outside_text(text):
            found.add(marks)
            found.quotes += quotes
            if (fault := found.fault(limits)) is not None:
                return number, fault
    return None


def _outside_text(body: bytes) -> Iterator[tuple[bytes, int]]:
    """Block by block: what stands outside strings, and the number of quotes."""
    at = quotes = 0
    while at < len(body):
        block = body[at : at + _BLOCK_BYTES]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block += body[at + len(block) : at + len(block) + 1]  # the byte that the last backslash escapes
        at += len(block)
        if b'"' in block:
            # Pairs of backslashes first: one that remains before a quote escapes it.
            plain = np.frombuffer(block.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
            is_quote = plain == ord('"')
            in_text = np.logical_xor.accumulate(is_quote) ^ bool(quotes % 2)
            found = int(np.count_nonzero(is_quote))
            quotes += found
            yield plain[~in_text].tobytes(), found
        else:
            yield b"" if quotes % 2 else block, 0
