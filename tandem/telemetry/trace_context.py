"""W3C trace context: which trace a request belongs to, and whether that is recorded.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_STATE_CHARS = 512

_SAMPLED = 0x01
# Version 00 ends after the flags; a later version may have more to say, and is read as far as it is known.
_PARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_STATE = re.compile(r"[\x20-\x7e\t]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`trace_id`: 32 hex digits. `parent_id`: the caller's span, 16 hex digits; None: the trace begins here. `state`:
    the `tracestate` as it came."""

    trace_id: str
    parent_id: str | None
    sampled: bool
    state: str = ""


def parse_context(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
    """None where there is none, or one that is not as it should be: the standard says to ignore that."""
    found = None if traceparent is None else _PARENT.fullmatch(traceparent)
    if found is None or (found["version"] == "00" and found["rest"]):
        return None
    fits = tracestate is not None and len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate)
    sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return TraceContext(found["trace"], found["span"], sampled, tracestate if fits and tracestate else "")


class TraceSampler:
    """A caller's word counts; else `ratio` of the requests get a trace of their own. `ratio` None: nothing is
    exported, and the context serves the logs alone."""

    def __init__(self, ratio: float | None) -> None:
        self._ratio = ratio or 0.0
        self._dice = random.Random()

    def context(self, header: Callable[[str], str | None]) -> TraceContext | None:
        """`header` gives a header's value by its lower-case name."""
        if (traceparent := header(TRACEPARENT)) is not None:
            given = parse_context(traceparent, header(TRACESTATE))
            if given is not None:
                return given
        if self._ratio and self._dice.random() < self._ratio:
            return TraceContext(secrets.token_hex(16), None, sampled=True)
        return None
