"""The identity of a process in the cluster, as two equivalent names in its certificate.

spiffe://tandem/CLUSTER/ROLE         (URI) servers authorise the caller by it
ROLE.CLUSTER.tandem.internal         (DNS) clients connect by address and verify this name instead
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

WorkerEpoch = tuple[str, int]  # one start of a worker: its id, and a number that no other of its starts has


class Identity(StrEnum):
    """A role. A certificate may carry several."""

    CONTROLLER = "controller"
    ROUTER = "router"
    WORKER = "worker"
    ADMIN = "admin"  # people, through `tandem status` and similar commands

    def uri(self, cluster: str) -> str:
        return f"spiffe://tandem/{cluster}/{self.value}"

    def dns_name(self, cluster: str) -> str:
        return f"{self.value}.{cluster}.tandem.internal"


def identities(names: Iterable[str], cluster: str) -> frozenset[Identity]:
    """The identities in this cluster among a certificate's names."""
    shown = set(names)
    return frozenset(each for each in Identity if each.uri(cluster) in shown)
