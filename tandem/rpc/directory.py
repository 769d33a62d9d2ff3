"""The controller's directory: roles as it names them, and changes between two versions, which a follower applies to the
one it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tandem.config.model import Role
from tandem.errors import TandemError
from tandem.v1.cluster_pb2 import ROLE_DECODE, ROLE_PREFILL, Directory, WorkerInfo, WorkerPlace

WIRE_ROLE = {Role.PREFILL: ROLE_PREFILL, Role.DECODE: ROLE_DECODE}
ROLE_OF = {number: role for role, number in WIRE_ROLE.items()}

E = TypeVar("E", WorkerInfo, WorkerPlace)


class DirectoryGap(TandemError):
    """Changes of a version that the follower does not have. It must ask for the whole directory, on another stream."""


def directory_changes(before: Directory, now: Directory) -> Directory:
    """What a follower that has `before` must be sent. Both are whole."""
    workers, gone = _changed(before.workers, now.workers)
    places, gone_places = _changed(before.places, now.places)
    return Directory(
        version=now.version,
        workers=workers,
        places=places,
        autoscaler_decisions=now.autoscaler_decisions,
        adapters=now.adapters,
        base_version=before.version,
        removed_workers=gone,
        removed_places=gone_places,
    )


def apply_directory(known: Directory | None, message: Directory) -> Directory:
    """The whole directory after a message of the stream; `known` is None before its first one. Raises DirectoryGap."""
    if not message.base_version:
        return message
    if known is None or known.version != message.base_version:
        have = "none" if known is None else f"version {known.version}"
        raise DirectoryGap(f"directory: expected changes of the one we have ({have}), got of {message.base_version}")
    return Directory(
        version=message.version,
        workers=_applied(known.workers, message.workers, message.removed_workers),
        places=_applied(known.places, message.places, message.removed_places),
        autoscaler_decisions=message.autoscaler_decisions,
        adapters=message.adapters,
    )


def _changed(before: Iterable[E], now: Iterable[E]) -> tuple[list[E], list[str]]:
    known = {entry.worker_id: entry for entry in before}
    wanted = {entry.worker_id: entry for entry in now}
    changed = [entry for name, entry in wanted.items() if known.get(name) != entry]
    return changed, [name for name in known if name not in wanted]


def _applied(known: Iterable[E], changed: Iterable[E], removed: Iterable[str]) -> list[E]:
    entries = {entry.worker_id: entry for entry in known}
    for name in removed:
        entries.pop(name, None)
    entries.update((entry.worker_id, entry) for entry in changed)
    return list(entries.values())
