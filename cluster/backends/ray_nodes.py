"""What a Ray cluster's nodes have: which of them hold workers, and which have room for one more. Every call blocks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.backends.machines import Machine, beside_partner, nearest
from cluster.backends.protocol import Resources, Where
from cluster.backends.ray_member import RayMember
from tandem.config.model import NODE_GROUP_LABEL, Colocate

log = logging.getLogger(__name__)

GCS_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Reservation:
    """One group's resources, placement group and members. `placement` None: not reserved yet."""

    resources: tuple[Resources, ...]
    where: Where
    placement: PlacementGroup | None
    members: list[RayMember]


def bundles_of(resources: Sequence[Resources]) -> list[dict[str, float]]:
    return [{"CPU": each.cpus} | ({"GPU": each.gpus} if each.gpus else {}) for each in resources]


def _draining_nodes() -> set[str]:
    # A private call, which Ray Serve uses too: there is no public one.
    gcs = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
    return set(gcs.get_draining_nodes(timeout=GCS_TIMEOUT_S))


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


class RayNodes:
    """`reservations`: of this cluster, by group. Another thread changes them."""

    def __init__(self, reservations: Mapping[str, Reservation]) -> None:
        self._reservations = reservations

    def near(self, reservation: Reservation) -> str | None:
        """The best node that has room; None if any is as good, or Ray does not tell."""
        where = reservation.where
        if where.colocate is Colocate.NO:
            return None
        try:
            return nearest(self.machines(where), reservation.resources, where.partner)
        except Exception as error:  # private parts of Ray: without them any node is as good
            log.warning("cannot choose a node near partners: %s", error)
            return None

    def beside_partner(self, reservation: Reservation, refused: Collection[str]) -> str | None:
        where = reservation.where
        to_come = len(where.partners) - len(self.node_of().keys() & {*where.partners})
        machines = [each for each in self.machines(where) if each.node not in refused]
        return beside_partner(machines, reservation.resources, where.partner, to_come)

    def no_room(self, reservation: Reservation) -> str:
        where = reservation.where
        groups = f" with the label {NODE_GROUP_LABEL}={' or '.join(where.node_groups)}" if where.node_groups else ""
        beside = " beside workers of the other role (colocate: require)" if where.colocate is Colocate.REQUIRE else ""
        try:
            nodes = ", ".join(f"{dict(each.free)}" for each in self.machines(where)) or "there is none"
        except RayError as error:
            nodes = f"not known ({type(error).__name__})"
        return (
            f"no Ray node{groups} has {bundles_of(reservation.resources)} free{beside}; free on each of these nodes: "
            f"{nodes}: add a node or ask for less"
        )

    def machines(self, where: Where) -> list[Machine]:
        """Those that stay and are in a group that the worker may be in."""
        placed, leaving = self.node_of(), _draining_nodes()
        own, partners = (
            Counter(placed[name] for name in names if name in placed) for names in (where.alike, where.partners)
        )
        free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        reserved = self._reserved(placed)

        def room(node: dict[str, Any], resource: str) -> float:
            # Ray's count may be from before the last reservation: more than the rest is not free.
            rest: float = node["Resources"].get(resource, 0.0) - reserved[node["NodeID"], resource]
            return min(free.get(node["NodeID"], {}).get(resource, 0.0), rest)

        return [
            Machine(
                node["NodeID"],
                {resource: room(node, resource) for resource in ("CPU", "GPU")},
                own[node["NodeID"]],
                partners[node["NodeID"]],
            )
            for node in _nodes()
            if node["Alive"]
            and node["NodeID"] not in leaving
            and (not where.node_groups or node["Labels"].get(NODE_GROUP_LABEL) in where.node_groups)
        ]

    def _reserved(self, placed: Mapping[str, str]) -> defaultdict[tuple[str, str], float]:
        """What this cluster holds of each node's CPUs and GPUs."""
        reserved: defaultdict[tuple[str, str], float] = defaultdict(float)
        for group, node in placed.items():
            if (reservation := self._reservations.get(group)) is not None:
                for bundle in bundles_of(reservation.resources):
                    for resource, amount in bundle.items():
                        reserved[node, resource] += amount
        return reserved

    def node_of(self) -> dict[str, str]:
        """The node of each group that is placed."""
        table: dict[str, Any] = placement_group_table()
        found = {}
        for name, reservation in list(self._reservations.items()):
            placement = reservation.placement
            entry = {} if placement is None else table.get(placement.id.hex(), {})
            for node in filter(None, entry.get("bundles_to_node_id", {}).values()):  # all of them are one
                found[name] = node
        return found

    def node_group(self, group: str) -> str:
        """The label of the node that the group is on; empty: it has none, or the group is not placed."""
        node = self.node_of().get(group)
        labels: dict[str, str] = next((each["Labels"] for each in _nodes() if each["NodeID"] == node), {})
        return labels.get(NODE_GROUP_LABEL, "")

    def draining(self) -> frozenset[str]:
        """Groups on nodes that Ray drains."""
        try:
            nodes = _draining_nodes()
            table: dict[str, Any] = placement_group_table() if nodes else {}
        except RayError as error:
            log.warning("cannot read which Ray nodes are draining: %s", error)
            return frozenset()
        affected = {key for key, each in table.items() if nodes.intersection(each["bundles_to_node_id"].values())}
        places = [(name, each.placement) for name, each in list(self._reservations.items())]
        return frozenset(name for name, place in places if place is not None and place.id.hex() in affected)
