"""W3C trace context: which trace a request belongs to, and whether it is recorded.

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
# Version 00 ends after the flags. A later version may have more fields, which are ignored.
_PARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_STATE = re.compile(r"[\x20-\x7e\t]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`trace_id` has 32 hex digits. `parent_id` is the caller's span, 16 hex digits; None: the trace starts here.
    `state` is the received `tracestate`."""

    trace_id: str
    parent_id: str | None
    sampled: bool
    state: str = ""


def parse_context(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
    """None without a valid `traceparent`; the standard says to ignore an invalid one."""
    found = None if traceparent is None else _PARENT.fullmatch(traceparent)
    if found is None or (found["version"] == "00" and found["rest"]):
        return None
    fits = tracestate is not None and len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate)
    sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return TraceContext(found["trace"], found["span"], sampled, tracestate if fits and tracestate else "")


class TraceSampler:
    """Follows the caller's sampling decision. Of requests without one, the share `ratio` gets a trace.

    `ratio` None: nothing is exported, and only the logs use the context.
    """

    def __init__(self, ratio: float | None) -> None:
        self._ratio = ratio or 0.0
        self._dice = random.Random()

    def context(self, header: Callable[[str], str | None]) -> TraceContext | None:
        """`header` returns a header's value by its lower-case name."""
        if (traceparent := header(TRACEPARENT)) is not None:
            given = parse_context(traceparent, header(TRACESTATE))
            if given is not None:
                return given
        if self._ratio and self._dice.random() < self._ratio:
            return TraceContext(secrets.token_hex(16), None, sampled=True)
        return None
