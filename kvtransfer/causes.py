"""Why a handoff failed: one enum member is one outcome and one metric label."""

from __future__ import annotations

from enum import StrEnum

from tandem.errors import HandoffError


class HandoffCause(StrEnum):
    DIGEST_MISMATCH = "digest_mismatch"
    INCOMPLETE = "incomplete"
    DEADLINE = "deadline"
    PEER_LOST = "peer_lost"
    REFUSED_TICKET = "refused_ticket"
    STALE_EPOCH = "stale_epoch"
    PROTOCOL = "protocol"
    CANCELLED = "cancelled"
    TRANSPORT = "transport"


class HandoffFault(HandoffError):
    """A handoff cannot go on, and for which cause."""

    def __init__(self, cause: HandoffCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class DeviceLost(Exception):
    """The device can no longer be used by this process; another process may use it."""


def parse_cause(name: str) -> HandoffCause:
    """An unknown cause (a newer peer) becomes `protocol`."""
    try:
        return HandoffCause(name)
    except ValueError:
        return HandoffCause.PROTOCOL


def protocol_fault(message: str) -> HandoffFault:
    """The peer said what a correct peer never says."""
    return HandoffFault(HandoffCause.PROTOCOL, message)
