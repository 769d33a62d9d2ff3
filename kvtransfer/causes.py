"""Causes of failed handoffs. Each enum member is one outcome and one metric label."""

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
    """A handoff failed for `cause`."""

    def __init__(self, cause: HandoffCause, message: str) -> None:
        super().__init__(message)
        self.args = (cause, message)  # for copies
        self.cause = cause


class DeviceLost(Exception):
    """This process can no longer use the device; a new process can."""


def parse_cause(name: str) -> HandoffCause:
    """An unknown cause, from a newer peer, becomes `protocol`."""
    try:
        return HandoffCause(name)
    except ValueError:
        return HandoffCause.PROTOCOL


def protocol_fault(message: str) -> HandoffFault:
    """The peer violated the protocol."""
    return HandoffFault(HandoffCause.PROTOCOL, message)
