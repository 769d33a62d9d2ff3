"""Limits of a JSON body, checked before objects are built from it.

A body grows when it is parsed: two bytes become a list of 56 bytes, and a million of them take seconds under the
interpreter lock, which stall the event loop from any thread. Counting takes milliseconds.
"""

from __future__ import annotations

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
    if len(body) <= limits.containers:
        return
    marks = body.translate(None, _NO_MARKS)  # an upper bound, as it includes marks within strings
    opened = marks.count(b"[") + marks.count(b"{")
    if _fault(opened, marks.count(b":"), marks.count(b'"'), marks.count(b","), limits) is not None:
        _check_outside_text(body, limits)


def _check_outside_text(body: bytes, limits: JsonLimits) -> None:
    at = opened = colons = quotes = commas = 0
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
            marks = plain[~in_text].tobytes()
            quotes += int(np.count_nonzero(is_quote))
        else:
            marks = b"" if quotes % 2 else block
        opened += marks.count(b"[") + marks.count(b"{")
        colons, commas = colons + marks.count(b":"), commas + marks.count(b",")
        if (fault := _fault(opened, colons, quotes, commas, limits)) is not None:
            raise InputError(f"body: {fault}; send less")


def _fault(opened: int, colons: int, quotes: int, commas: int, limits: JsonLimits) -> str | None:
    checks = (
        ("objects and lists", opened, limits.containers),
        ("keys", colons, limits.keys),
        ("strings", quotes // 2, limits.strings),
        ("values", commas + opened, limits.values),
    )
    return next((f"expected at most {most} {what}" for what, count, most in checks if count > most), None)
