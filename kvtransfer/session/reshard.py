"""Plans which prefill rank sends which KV heads to which decode rank, for any pair of tensor-parallel widths.

With `tp <= kv_heads` a rank owns `kv_heads / tp` whole heads. With more ranks than heads, rank r owns head `r *
kv_heads // tp`, so heads are replicated. Every decode rank gets each of its heads from exactly one prefill rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import IncompatiblePools
from tandem.rpc.versions import common_version


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """One prefill rank sends heads [head_start, head_start + head_count) of the model to one decode rank.

    `src_head` and `dst_head` are the indices of the first head in the two ranks' pools.
    """

    prefill_rank: int
    decode_rank: int
    head_start: int
    head_count: int
    src_head: int
    dst_head: int


class KvShape(Protocol):
    """Properties that both ends of a handoff must share. `kv_heads` are the model's. cluster_pb2.KvLayout implements
    it."""

    @property
    def model_fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def adapter(self) -> str: ...
    @property
    def joined(self) -> bool: ...
    @property
    def packed(self) -> bool: ...
    @property
    def protocol(self) -> int: ...
    @property
    def oldest_protocol(self) -> int: ...


COMPARED = (
    "model_fingerprint",
    "adapter",
    "dtype",
    "layers",
    "kv_heads",
    "joined",
    "packed",
    "head_dim",
    "block_tokens",
)


def heads_of_rank(tp: int, kv_heads: int, rank: int) -> range:
    """The model's KV heads that a rank owns.

    Raises:
        IncompatiblePools: `tp` ranks cannot divide the heads.
    """
    if tp < 1 or kv_heads < 1:
        raise IncompatiblePools(f"tp: expected at least 1 rank and 1 KV head, got tp {tp} and {kv_heads} heads")
    if tp > kv_heads:
        head = rank * kv_heads // tp
        return range(head, head + 1)
    if kv_heads % tp:
        fitting = [width for width in range(1, kv_heads + 1) if kv_heads % width == 0]
        raise IncompatiblePools(f"tp: {kv_heads} KV heads cannot be divided among {tp} ranks; these fit: {fitting}")
    count = kv_heads // tp
    return range(rank * count, (rank + 1) * count)


def reshard_plan(prefill_tp: int, decode_tp: int, kv_heads: int) -> tuple[PlannedLink, ...]:
    """All links of a pair of workers, at most one for each pair of ranks.

    Raises:
        IncompatiblePools: one of the widths does not fit the model.
    """
    owners: defaultdict[int, list[int]] = defaultdict(list)
    starts: list[int] = []
    for prefill_rank in range(prefill_tp):
        owned = heads_of_rank(prefill_tp, kv_heads, prefill_rank)
        starts.append(owned.start)
        for head in owned:
            owners[head].append(prefill_rank)
    links: list[PlannedLink] = []
    needed: defaultdict[int, int] = defaultdict(int)  # decode ranks that have requested this head
    for decode_rank in range(decode_tp):
        wanted = heads_of_rank(decode_tp, kv_heads, decode_rank)
        heads_from: defaultdict[int, list[int]] = defaultdict(list)
        for head in wanted:
            replicas = owners[head]
            heads_from[replicas[needed[head] % len(replicas)]].append(head)
            needed[head] += 1
        for source, heads in sorted(heads_from.items()):
            links.append(
                PlannedLink(
                    source, decode_rank, heads[0], len(heads), heads[0] - starts[source], heads[0] - wanted.start
                )
            )
    return tuple(links)


def check_compatible(a: KvShape, b: KvShape) -> None:
    """Checks that blocks can move between two workers, in either direction.

    Raises:
        IncompatiblePools: names the field that differs and both values, or the width that does not fit.
        IncompatibleVersions: they have no protocol version in common.
    """
    for name in COMPARED:
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            raise IncompatiblePools(
                f"{name}: expected the same on both workers, got {mine!r} and {theirs!r}", field=name
            )
    common_version(a, b)
    reshard_plan(a.tp, b.tp, a.kv_heads)
