"""Which version of a protocol two sides speak: the newest that both support.

A release supports its own version and the one before, so that a cluster can be upgraded part by part. Both numbers
are on the wire: `protocol`, the newest, and `oldest_protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.errors import IncompatibleVersions


class ProtocolRange(Protocol):
    """The versions one side supports, both ends included."""

    @property
    def protocol(self) -> int: ...
    @property
    def oldest_protocol(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Versions:
    """Implements `ProtocolRange`."""

    protocol: int
    oldest_protocol: int


CONTROL_VERSIONS = Versions(1, oldest_protocol=1)
"""Between the controller and its workers and routers."""
CONTROL_BEFORE_RANGES = 1


def stated_versions(message: ProtocolRange, before_ranges: int) -> Versions:
    """What a message says. Releases that sent no range supported one version; `before_ranges`: of those that sent no
    version either."""
    newest = message.protocol or before_ranges
    return Versions(newest, message.oldest_protocol or newest)


def common_version(
    a: ProtocolRange, b: ProtocolRange, names: tuple[str, str] = ("the first worker", "the second")
) -> int:
    """Raises IncompatibleVersions if no version is supported by both. `names`: of the sides, for the message."""
    newest = min(a.protocol, b.protocol)
    if newest < max(a.oldest_protocol, b.oldest_protocol):
        older = names[a.protocol > b.protocol]
        raise IncompatibleVersions(
            f"protocol: {names[0]} supports versions {a.oldest_protocol} to {a.protocol}, {names[1]} "
            f"{b.oldest_protocol} to {b.protocol}: update {older} first, release by release",
            field="protocol",
        )
    return newest
