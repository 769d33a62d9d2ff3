"""How KV blocks will move between the GPUs of this machine, by the rule that the transfer agents use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

from cluster.devices import GpuReport, device_name
from kvtransfer.connection.handshake import LinkRefused, LocalRank
from kvtransfer.control import AttachPool, DeviceMemory, Peer, WireLayout
from kvtransfer.transports.factory import FASTEST_FIRST, PROCESS_GROUP, choose_transport
from tandem.config.spec import TransportKind
from tandem.errors import ConfigError

_HERE = "here"
_OTHER_GPU = "a GPU there"


@dataclass(frozen=True, slots=True)
class _Reach:
    """In place of a GPU pool: which GPU reads which, by UUID."""

    reads: frozenset[tuple[str, str]]

    def reaches(self, reader: str, owner: str) -> bool:
        return reader == owner or (reader, owner) in self.reads


class _AnyTls:
    """In place of certificates: the choice depends only on whether there are any."""

    def current(self) -> object:
        return self


def kv_paths(transport: TransportKind, report: GpuReport, *, encrypted: bool) -> Iterator[str]:
    """One line for each way between GPUs: on the same GPU, from one to another, and to another host."""
    paths = {
        (a.ordinal, b.ordinal): _path(transport, report, a.uuid, b.uuid, encrypted)
        for a in report.gpus
        for b in report.gpus
    }
    if report.gpus:
        yield f"KV between workers on one GPU: {', '.join(sorted({paths[g.ordinal, g.ordinal] for g in report.gpus}))}"
    for path, pairs in _by_path(paths, permutations([gpu.ordinal for gpu in report.gpus], 2)).items():
        yield f"KV between GPUs ({', '.join(pairs)}): {path}"
    if report.gpus:
        first = report.gpus[0].uuid
        yield f"KV to another host: {_path(transport, report, first, _OTHER_GPU, encrypted, host='there')}"


def _by_path(paths: dict[tuple[int, int], str], pairs: Iterable[tuple[int, int]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for sender, receiver in pairs:
        found.setdefault(paths[sender, receiver], []).append(f"{device_name(sender)} to {device_name(receiver)}")
    return found


def _path(
    transport: TransportKind, report: GpuReport, sender: str, receiver: str, encrypted: bool, host: str = _HERE
) -> str:
    try:
        kind, reason = choose_transport(
            _local(transport, report, sender, encrypted),
            Peer(
                "a worker", 0, 0, 1, host, "socket", "127.0.0.1:1",
                device=receiver, machine_id=host, transports=(*FASTEST_FIRST, PROCESS_GROUP),
            ),
        )  # fmt: skip
    except (LinkRefused, ConfigError) as error:
        return f"refused ({error})"
    return f"{kind} ({reason})" if reason else kind


def _local(transport: TransportKind, report: GpuReport, device: str, encrypted: bool) -> LocalRank:
    uuids = {gpu.ordinal: gpu.uuid for gpu in report.gpus}
    reads = frozenset((uuids[reader], uuids[owner]) for reader, owner in report.peers)
    attach = AttachPool(
        "", 0, 0, 1, 1, "", WireLayout(1, 1, 1, 1, 1, ""), b"", True, transport.value, "", "", 1.0,
        memory=DeviceMemory(device, 0),
    )  # fmt: skip
    tls = cast(Any, _AnyTls()) if encrypted else None
    return LocalRank(attach, cast(Any, _Reach(reads)), None, _HERE, _HERE, cast(Any, None), tls)
