"""What a JSON body may hold, found out before anything is built from it.

Building is where a body multiplies: two bytes make a list of 56, a million of them seconds of work under the
interpreter lock, which is the event loop's time in whatever thread it happens. Counting takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.errors import InputError

_STRETCH_BYTES = 64 << 10  # counted at a time: fits a core's cache
_NO_MARKS = bytes(set(range(256)) - set(b'[{:,"'))


@dataclass(frozen=True, slots=True)
class Limits:
    containers: int = 1 << 15  # objects and lists: of 4096 messages, eight each
    keys: int = 1 << 15
    strings: int = 1 << 16  # keys among them
    values: int = 1 << 19  # token ids, mostly


DEFAULT_LIMITS = Limits()


def check_body(body: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises InputError. Less than 1 ms for each MB; where text is full of brackets and commas, some more.

    What is no JSON may pass; its parser stops at the first fault.
    """
    if len(body) <= limits.containers:
        return
    marks = body.translate(None, _NO_MARKS)  # those in text as well: the most there can be
    opened = marks.count(b"[") + marks.count(b"{")
    if _fault(opened, marks.count(b":"), marks.count(b'"'), marks.count(b","), limits) is not None:
        _check_outside_text(body, limits)


def _check_outside_text(body: bytes, limits: Limits) -> None:
    at = opened = colons = quotes = commas = 0
    while at < len(body):
        stretch = body[at : at + _STRETCH_BYTES]
        if (len(stretch) - len(stretch.rstrip(b"\\"))) % 2:
            stretch += body[at + len(stretch) : at + len(stretch) + 1]  # what the last backslash escapes
        at += len(stretch)
        if b'"' in stretch:
            # Pairs of backslashes first: what is left before a quote escapes it.
            plain = np.frombuffer(stretch.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
            is_quote = plain == ord('"')
            in_text = np.logical_xor.accumulate(is_quote) ^ bool(quotes % 2)
            marks = plain[~in_text].tobytes()
            quotes += int(np.count_nonzero(is_quote))
        else:
            marks = b"" if quotes % 2 else stretch
        opened += marks.count(b"[") + marks.count(b"{")
        colons, commas = colons + marks.count(b":"), commas + marks.count(b",")
        if (fault := _fault(opened, colons, quotes, commas, limits)) is not None:
            raise InputError(f"body: {fault}; send less")


def _fault(opened: int, colons: int, quotes: int, commas: int, limits: Limits) -> str | None:
    checks = (
        ("objects and lists", opened, limits.containers),
        ("keys", colons, limits.keys),
        ("strings", quotes // 2, limits.strings),
        ("values", commas + opened, limits.values),
    )
    return next((f"expected at most {most} {what}" for what, count, most in checks if count > most), None)
