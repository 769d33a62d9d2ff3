"""The chain of an audit log: the value at the end of a line vouches for the line and for all before it of its segment.

A segment is what one process writes from its start to its end. It begins with a header line, repeats one in each new
file, and ends with a line of its own. The value is a SHA-256, or with a key an HMAC, which takes the key
to compute. Values are over bytes, so a line that was only formatted anew is found, too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_BEFORE_VALUE = b',"chain":"'
_TAIL_BYTES = len(_BEFORE_VALUE) + 2 * hashlib.sha256().digest_size + len(b'"}\n')


class Mark(StrEnum):
    """What a line of the chain itself says, in its field `audit`."""

    BEGIN = "begin"
    CONTINUE = "continue"  # in another file
    LOST = "lost"  # lines were lost or dropped before it
    END = "end"


def algorithm(key: bytes | None) -> str:
    return "sha256" if key is None else "hmac-sha256"


def _value(key: bytes | None, before: str, content: bytes) -> str:
    data = before.encode() + b"\n" + content
    return hashlib.sha256(data).hexdigest() if key is None else hmac.new(key, data, hashlib.sha256).hexdigest()


def last_value(tail: bytes) -> str:
    """The value of the line that ends the file; empty if there is none."""
    end = tail[-_TAIL_BYTES:]
    return end[len(_BEFORE_VALUE) : -3].decode("ascii", "replace") if end.startswith(_BEFORE_VALUE) else ""


@dataclass(slots=True)
class Chain:
    """The end of a segment that is being written."""

    writer: str
    key: bytes | None = field(default=None, repr=False)
    segment: str = field(default_factory=lambda: secrets.token_hex(8))
    lines: int = 0
    value: str = ""

    def link(self, line: bytes) -> bytes:
        """The line, a JSON object, with its place in the segment and its value."""
        content = line[:-1] + f',"segment":"{self.segment}","number":{self.lines}'.encode()
        self.value = _value(self.key, self.value, content)
        self.lines += 1
        return content + _BEFORE_VALUE + self.value.encode() + b'"}'

    def header(self, time: str, follows: str) -> bytes:
        """The first line in a file. `follows`: the value of the line before it there."""
        mark = Mark.CONTINUE if self.lines else Mark.BEGIN
        return self.mark(time, mark, writer=self.writer, digest=algorithm(self.key), after=self.value, follows=follows)

    def mark(self, time: str, mark: Mark, **fields: object) -> bytes:
        return self.link(json.dumps({"time": time, "audit": mark, **fields}, separators=(",", ":")).encode())


@dataclass(frozen=True, slots=True)
class Break:
    """The first line that is not what the chain says."""

    file: str
    line: int
    expected: str

    def __str__(self) -> str:
        return f"{self.file}: line {self.line}: expected {self.expected}"


@dataclass(slots=True)
class _Segment:
    writer: str
    lines: int = 0
    value: str = ""
    first: int = 0  # the number of the first line that was given
    has_ended: bool = False


@dataclass(slots=True)
class Verification:
    lines: int = 0
    broken: Break | None = None
    segments: dict[str, _Segment] = field(default_factory=dict)
    lost: int = 0

    def notes(self) -> list[str]:
        """What no file can tell alone."""
        found = []
        for name, each in self.segments.items():
            what = f"segment {name} of {each.writer}"
            if each.first:
                found.append(f"{what} begins with its line {each.first}: the earlier ones are in files not given here")
            if not each.has_ended:
                found.append(
                    f"{what} has no end: the process runs, was killed, or lines after its line {each.lines - 1} were "
                    "removed"
                )
        if self.lost:
            found.append(f"lines that could not be written when they were made, as the log itself says: {self.lost}")
        return found


class _Broken(Exception):
    pass


def verify(files: Sequence[tuple[str, Iterable[bytes]]], key: bytes | None) -> Verification:
    """`files`: names and lines, the oldest first. Stops at the first break."""
    found = Verification()
    for name, lines in files:
        before, checked = "", 0
        try:
            for line in lines:
                before = _check(found, line, before, key)
                checked += 1
        except _Broken as broken:
            found.broken = Break(name, checked + 1, str(broken))
        found.lines += checked
        if found.broken is not None:
            break
    return found


def _check(found: Verification, line: bytes, before: str, key: bytes | None) -> str:
    """Returns the line's value. `before`: that of the line before it in its file."""
    content, separator, rest = line.rpartition(_BEFORE_VALUE)
    if not line.endswith(b"\n") or not separator:
        raise _Broken('a whole line that ends with its "chain" value: it was cut or altered, or is not of a chain')
    try:
        fields: dict[str, Any] = json.loads(content + b"}")
        name, number, mark = str(fields["segment"]), int(fields["number"]), fields.get("audit")
        value = rest.removesuffix(b'"}\n').decode("ascii")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _Broken("a JSON object with segment and number: it was altered") from None
    if mark in (Mark.BEGIN, Mark.CONTINUE):
        _check_header(found, fields, name, number, before, key)
    segment = found.segments.get(name)
    if segment is None or segment.has_ended:
        raise _Broken(f"the header of segment {name} before its line {number}: lines were removed")
    if number != segment.lines:
        raise _Broken(
            f"line {segment.lines} of segment {name} ({segment.writer}), got its line {number}: lines were removed, "
            "repeated or reordered"
        )
    if not hmac.compare_digest(value.encode(), _value(key, segment.value, content).encode()):
        another = "" if key is None else ", or the key is another"
        raise _Broken(f'the "chain" value of this content, got another: the line was altered{another}')
    segment.lines, segment.value, segment.has_ended = number + 1, value, mark == Mark.END
    if mark == Mark.LOST:
        found.lost += int(fields.get("lines", 0))
    return value


def _check_header(
    found: Verification, fields: dict[str, Any], name: str, number: int, before: str, key: bytes | None
) -> None:
    if fields.get("digest") != algorithm(key):
        hint = "pass the key with --key-file" if key is None else "another key or no key was used"
        raise _Broken(f"digest {algorithm(key)}, got {fields.get('digest')}: {hint}")
    if fields.get("follows") != before:
        raise _Broken("a header that follows the line before it here: lines between them were removed or added")
    if name not in found.segments:
        begins = fields["audit"] == Mark.BEGIN
        if begins != (number == 0):
            raise _Broken(f"a header of segment {name} that fits its line {number}")
        found.segments[name] = _Segment(str(fields.get("writer")), number, str(fields.get("after")), number)
