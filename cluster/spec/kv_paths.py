"""How KV blocks will move between the GPUs of this machine, by the rule that the transfer agents use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, NamedTuple, cast

from cluster.devices import DeviceBook, GpuReport, device_name, pinned_ordinal
from cluster.spec.gpus import gpu_workers, resolve_devices
from kvtransfer.connection.handshake import LinkRefused, LocalRank
from kvtransfer.control import AttachPool, DeviceMemory, Peer, WireLayout
from kvtransfer.transports.choice import FASTEST_FIRST, PROCESS_GROUP, choose_transport
from kvtransfer.transports.host_support import HostSupport
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.config.transfer import TransportKind

_HERE = "here"
_OTHER_GPU = "a GPU there"


@dataclass(frozen=True, slots=True)
class _Reach:
    """In place of a GPU pool: which GPU reads which, by UUID."""

    reads: frozenset[tuple[str, str]]

    def reaches(self, reader: str, owner: str) -> bool:
        return reader == owner or (reader, owner) in self.reads


class _Way(NamedTuple):
    """How blocks move, for people."""

    text: str
    is_refused: bool = False


class _AnyTls:
    """In place of certificates: the choice depends only on whether there are any."""

    def current(self) -> object:
        return self


@dataclass(frozen=True, slots=True)
class UsedPaths:
    """Between which GPUs of this machine, (sender, receiver) ordinals, and whether also to another host."""

    pairs: frozenset[tuple[int, int]]
    to_another_host: bool = False


def used_paths(spec: ClusterSpec, report: GpuReport) -> UsedPaths:
    """The paths that handoffs of this cluster take. Raises ConfigError if its workers do not fit this machine's GPUs.

    Ray chooses the GPUs itself. With nodes of its own it uses other hosts if this one has too few GPUs.
    """
    if spec.control.backend == "ray":
        return _paths_under_ray(spec, report)
    book = DeviceBook(resolve_devices(spec, lambda: report))
    placed = [
        (workers.model, workers.role, device)
        for workers in gpu_workers(spec)
        for name in workers.names()
        for device in book.assign(name, workers.tp, workers.engine.device_share, workers.engine.device)
    ]
    return UsedPaths(
        frozenset(
            (pinned_ordinal(sender) or 0, pinned_ordinal(receiver) or 0)
            for model, role, sender in placed
            for other, other_role, receiver in placed
            if other is model and role is Role.PREFILL and other_role is Role.DECODE
        )
    )


def _paths_under_ray(spec: ClusterSpec, report: GpuReport) -> UsedPaths:
    resolve_devices(spec, lambda: report)
    ordinals = [gpu.ordinal for gpu in report.gpus]
    needed = sum(each.engine.device_share * each.tp * len(list(each.names())) for each in gpu_workers(spec))
    shared = any(sum(model.engine_of(role).device_share for role in Role) <= 1 for model in spec.models)
    pairs = {*permutations(ordinals, 2), *((each, each) for each in ordinals if shared)}
    return UsedPaths(frozenset(pairs), spec.control.ray_address is not None and needed > len(ordinals))


def kv_paths(
    transport: TransportKind, report: GpuReport, used: UsedPaths, *, encrypted: bool
) -> tuple[list[str], list[str]]:
    """One line for each way between GPUs: on the same GPU, from one to another, and to another host.

    Returns:
        Ways that work, and those that this cluster uses and that are refused. Ways that are refused and unused are
        left out.
    """
    ordinals = {gpu.ordinal: gpu.uuid for gpu in report.gpus}
    ways = {
        (a, b): _path(transport, report, ordinals[a], ordinals[b], encrypted) for a, b in product(ordinals, repeat=2)
    }
    ways = {pair: way for pair, way in ways.items() if pair in used.pairs or not way.is_refused}
    lines = [("KV between workers on one GPU", way) for way in sorted({way for (a, b), way in ways.items() if a == b})]
    for way, pairs in _by_way(ways, permutations(ordinals, 2)).items():
        lines.append((f"KV between GPUs ({', '.join(pairs)})", way))
    if report.gpus:
        away = _path(transport, report, report.gpus[0].uuid, _OTHER_GPU, encrypted, host="there")
        if used.to_another_host or not away.is_refused:
            lines.append(("KV to another host", away))
    works = [f"{between}: {way.text}" for between, way in lines if not way.is_refused]
    return works, [f"{between}: {way.text}" for between, way in lines if way.is_refused]


def _by_way(ways: dict[tuple[int, int], _Way], pairs: Iterable[tuple[int, int]]) -> dict[_Way, list[str]]:
    found: dict[_Way, list[str]] = {}
    for sender, receiver in pairs:
        if way := ways.get((sender, receiver)):
            found.setdefault(way, []).append(f"{device_name(sender)} to {device_name(receiver)}")
    return found


def _path(
    transport: TransportKind, report: GpuReport, sender: str, receiver: str, encrypted: bool, host: str = _HERE
) -> _Way:
    peer = Peer(
        "a worker", 0, 0, 1, host, "socket", "127.0.0.1:1",
        device=receiver, machine_id=host, transports=(*FASTEST_FIRST, PROCESS_GROUP),
    )  # fmt: skip
    support = HostSupport(lambda kind: report.missing.get(kind, ""), lambda: report.rdma)
    try:
        kind, reason = choose_transport(_local(transport, report, sender, encrypted), peer, support)
    except LinkRefused as error:
        return _Way(f"refused ({error})", is_refused=True)
    return _Way(f"{kind} ({reason})" if reason else kind)


def _local(transport: TransportKind, report: GpuReport, device: str, encrypted: bool) -> LocalRank:
    uuids = {gpu.ordinal: gpu.uuid for gpu in report.gpus}
    reads = frozenset((uuids[reader], uuids[owner]) for reader, owner in report.peers)
    attach = AttachPool(
        "", 0, 0, 1, 1, "", WireLayout(1, 1, 1, 1, 1, ""), b"", True, transport.value, "", "", 1.0,
        memory=DeviceMemory(device, 0),
    )  # fmt: skip
    tls = cast(Any, _AnyTls()) if encrypted else None
    return LocalRank(attach, cast(Any, _Reach(reads)), None, _HERE, _HERE, cast(Any, None), tls)
