"""Who a process of the cluster is: what its certificate says, in two names of the same meaning.

spiffe://tandem/CLUSTER/ROLE         (URI) shown to servers, which decide by it what the caller may do
ROLE.CLUSTER.tandem.internal         (DNS) shown to clients, which find servers by address and so ask for this name
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Identity(StrEnum):
    """A certificate may carry several."""

    CONTROLLER = "controller"
    ROUTER = "router"
    WORKER = "worker"
    ADMIN = "admin"  # people: `tandem status` and its kind

    def uri(self, cluster: str) -> str:
        return f"spiffe://tandem/{cluster}/{self.value}"

    def dns_name(self, cluster: str) -> str:
        return f"{self.value}.{cluster}.tandem.internal"


def identities(names: Iterable[str], cluster: str) -> frozenset[Identity]:
    """Those that a certificate's names (of whatever kind) give in this cluster."""
    shown = set(names)
    return frozenset(each for each in Identity if each.uri(cluster) in shown)
