"""A worker's prefix events in Redis: key names, event codec and snapshot codec. Torch-free and Redis-free.

Each worker has one stream of events and one snapshot. An entry's stream id is `{epoch}-{seq}`, so ids reveal gaps, and
a reader with a snapshot (epoch, seq) continues exactly there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandem.kvcache.blockhash import HASH_BYTES, BlockHash

EVENT_FIELD = b"e"
MAX_EVENT_HASHES = 1 << 14
MAX_SNAPSHOT_HASHES = 1 << 24

_VERSION = 1
_EVENT = struct.Struct("<BB")  # version, stored
_SNAPSHOT = struct.Struct("<BQQ")  # version, epoch, seq

SNAPSHOT_HEADER_BYTES = _SNAPSHOT.size
MAX_SNAPSHOT_BYTES = SNAPSHOT_HEADER_BYTES + MAX_SNAPSHOT_HASHES * HASH_BYTES


class PrefixEventError(ValueError):
    """The bytes are not a prefix event or snapshot of a known version."""


# The braces keep a worker's keys on one shard of a Redis Cluster, so that one command may use several of them.
def stream_key(cluster: str, worker_id: str) -> str:
    return f"tandem:{{{cluster}}}:prefix:{worker_id}:events"


def snapshot_key(cluster: str, worker_id: str) -> str:
    return f"tandem:{{{cluster}}}:prefix:{worker_id}:snapshot"


def wanted_key(cluster: str, worker_id: str) -> str:
    """Set by a router that needs a new snapshot, deleted by the worker that writes one."""
    return f"tandem:{{{cluster}}}:prefix:{worker_id}:wanted"


class PrefixEvent(NamedTuple):
    """Blocks that became findable on a worker (`stored`) or stopped being findable. `seq` counts from each epoch's
    start.

    `hashes` are concatenated, to avoid one object per hash.
    """

    epoch: int
    seq: int
    stored: bool
    hashes: bytes


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The epoch and last event of a snapshot, which includes all events up to `seq`."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All findable blocks of a worker after event `seq`; `hashes` are concatenated."""

    epoch: int
    seq: int
    hashes: bytes


def entry_id(epoch: int, seq: int) -> str:
    """The stream id of an event."""
    return f"{epoch}-{seq}"


def encode_event(event: PrefixEvent) -> bytes:
    """The value of EVENT_FIELD. The entry's id holds epoch and seq."""
    return _EVENT.pack(_VERSION, event.stored) + event.hashes


def decode_event(entry: str, value: bytes) -> PrefixEvent:
    """Raises PrefixEventError. Optimised: a router decodes every event of every worker."""
    epoch, _, seq = entry.partition("-")
    if not (epoch.isdecimal() and seq.isdecimal()):
        raise PrefixEventError(f"expected an entry id like epoch-seq, got {entry!r}")
    if len(value) < _EVENT.size:
        raise PrefixEventError(f"expected at least {_EVENT.size} bytes, got {len(value)}")
    _check_version(value[0])
    return PrefixEvent(int(epoch), int(seq), value[1] != 0, _whole_hashes(value[_EVENT.size :], MAX_EVENT_HASHES))


def encode_snapshot(snapshot: PrefixSnapshot) -> bytes:
    return _SNAPSHOT.pack(_VERSION, snapshot.epoch, snapshot.seq) + snapshot.hashes


def decode_snapshot(value: bytes) -> PrefixSnapshot:
    """Raises PrefixEventError."""
    header = decode_snapshot_header(value)
    hashes = _whole_hashes(value[SNAPSHOT_HEADER_BYTES:], MAX_SNAPSHOT_HASHES)
    return PrefixSnapshot(header.epoch, header.seq, hashes)


def decode_snapshot_header(value: bytes) -> SnapshotHeader:
    """Reads the header from the first SNAPSHOT_HEADER_BYTES of `value`. Raises PrefixEventError."""
    if len(value) < SNAPSHOT_HEADER_BYTES:
        raise PrefixEventError(f"expected at least {SNAPSHOT_HEADER_BYTES} bytes, got {len(value)}")
    version, epoch, seq = _SNAPSHOT.unpack_from(value)
    _check_version(version)
    return SnapshotHeader(epoch, seq)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Splits concatenated hashes. Raises PrefixEventError."""
    _whole_hashes(joined, MAX_SNAPSHOT_HASHES)
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def _check_version(version: int) -> None:
    if version != _VERSION:
        raise PrefixEventError(f"expected version {_VERSION}, got {version}")


def _whole_hashes(joined: bytes, limit: int) -> bytes:
    if len(joined) % HASH_BYTES or len(joined) > limit * HASH_BYTES:
        raise PrefixEventError(f"expected at most {limit} hashes of {HASH_BYTES} bytes, got {len(joined)} bytes")
    return joined
