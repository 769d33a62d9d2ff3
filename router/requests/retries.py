"""What the error of an attempt says about its workers, and whether another attempt may help."""

from __future__ import annotations

from tandem.errors import ErrorCode

# The worker is well but cannot take the request now (no KV blocks, a transfer agent being replaced).
REFUSALS = frozenset({ErrorCode.KV_EXHAUSTED, ErrorCode.UNAVAILABLE})
HANDOFF_FAULTS = frozenset({ErrorCode.HANDOFF_FAILED, ErrorCode.DEADLINE_EXCEEDED})
BLAMED = HANDOFF_FAULTS | {ErrorCode.INTERNAL}  # the link itself reports a lost worker
RETRIED = HANDOFF_FAULTS | REFUSALS | {ErrorCode.WORKER_LOST}
