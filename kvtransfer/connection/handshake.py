"""The first messages of a link: a hello with identities, layout and plan, and its acceptance or permanent refusal.

Msgspec structs, framed like `tandem.rpc.channel`, at most 64 KiB. Over a unix socket the hello carries the sender's
pool.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.sockets import receive_first
from kvtransfer.connection.tls import Wire
from kvtransfer.control import AttachPool, DeviceMemory, Peer, WireLayout
from kvtransfer.pool.pool import Bytes, PoolMap
from kvtransfer.pool.pools import Pool
from kvtransfer.pool.staging import Staging
from kvtransfer.session.reshard import PlannedLink, check_compatible, reshard_plan
from tandem.errors import IncompatiblePools
from tandem.kvcache.layout import DTYPE_BYTES, KvPoolLayout
from tandem.rpc.tls import RenewedTls, TlsContexts
from tandem.rpc.versions import common_version

MAX_TP = 4096
MAPPED = "mapped"
NCCL = "nccl"
NIXL = "nixl"
XXH3 = "xxh3"
MULTILINEAR = "multilinear"  # kvtransfer.pool.device_digest
KEY_BITS = 63  # of MULTILINEAR


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the sending agent. `protocol` is the version of this link; `link` is the plan's entry as the sender computed
    it."""

    protocol: int
    transport: str
    worker_id: str
    epoch: int
    rank: int
    tp: int
    to_worker: str
    to_epoch: int
    to_rank: int
    model_kv_heads: int
    model_fingerprint: str
    layout: WireLayout
    link: tuple[int, int, int, int]
    digests: bool
    int8: bool = False
    memory: DeviceMemory | None = None  # `mapped`: the sender's pool; None: the file sent with the hello
    digest_kinds: tuple[str, ...] = (XXH3,)  # kinds that the sender can compute on this link
    device_index: int = 0  # of the sender's GPU in its process, for NIXL


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """From the receiving agent.

    `digests`: every piece must have one. `data_port`: port of the data path, for transports with one (`process_group`:
    its store). `data_token`: token that the data connection must present first. Without `digest_kind`, as in early
    version 2, digests are xxh3.
    """

    worker_id: str
    epoch: int
    rank: int
    digests: bool
    data_port: int | None = msgspec.field(default=None, name="store_port")  # its name in version 1
    data_token: bytes = b""
    digest_kind: str = XXH3  # one of the hello's kinds
    digest_key: int = 0  # key of MULTILINEAR, for this connection only
    max_piece_bytes: int | None = None  # None: the transport's


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Permanent refusal: this link will never work between these two epochs."""

    cause: str
    reason: str


_ANSWERS: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_HELLO = msgspec.msgpack.Decoder(Hello)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """The local rank as it attached to this agent."""

    attach: AttachPool
    pool: Pool
    pool_fd: int | None
    host_id: str
    machine_id: str
    staging: Staging[Bytes]
    renewed_tls: RenewedTls | None = None

    @property
    def tls(self) -> TlsContexts | None:
        """TLS contexts for the next connection."""
        return None if self.renewed_tls is None else self.renewed_tls.current()

    @property
    def device(self) -> str:
        """As in Peer."""
        return self.attach.memory.device if self.attach.memory is not None else ""

    @property
    def layout(self) -> KvPoolLayout:
        return self.pool.layout


@dataclass(frozen=True, slots=True)
class Shape:
    """Implements `reshard.KvShape`."""

    model_fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    tp: int
    adapter: str
    joined: bool
    packed: bool
    protocol: int
    oldest_protocol: int


def pool_layout(wire: WireLayout) -> KvPoolLayout:
    """Raises HandoffFault (protocol) if the layout is invalid."""
    sizes = (wire.num_blocks, wire.layers, wire.kv_heads, wire.block_tokens, wire.head_dim)
    if wire.dtype not in DTYPE_BYTES or not all(0 < size < 1 << 31 for size in sizes):
        raise protocol_fault(f"layout: expected positive sizes and a known dtype, got {wire}")
    return KvPoolLayout(*sizes, wire.dtype, wire.joined, wire.packed)


def make_hello(local: LocalRank, peer: Peer, link: PlannedLink, transport: str, *, int8: bool) -> Hello:
    """Raises IncompatibleVersions if both have no protocol version in common."""
    attach = local.attach
    hashes_on_device = transport in (MAPPED, NCCL, NIXL) and bool(local.device)
    return Hello(
        protocol=common_version(attach, peer, (attach.worker_id, peer.worker_id)),
        transport=transport,
        worker_id=attach.worker_id,
        epoch=attach.epoch,
        rank=attach.rank,
        tp=attach.tp,
        to_worker=peer.worker_id,
        to_epoch=peer.epoch,
        to_rank=peer.rank,
        model_kv_heads=attach.model_kv_heads,
        model_fingerprint=attach.model_fingerprint,
        layout=attach.layout,
        link=(link.head_start, link.head_count, link.src_head, link.dst_head),
        digests=attach.digests,
        int8=int8,
        memory=attach.memory if transport == MAPPED else None,
        digest_kinds=(MULTILINEAR,) if hashes_on_device else (XXH3,),
        device_index=0 if isinstance(local.pool, PoolMap) else local.pool.device.index or 0,
    )


def parse_hello(body: bytes) -> Hello:
    """Raises HandoffFault (protocol)."""
    try:
        return _HELLO.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise protocol_fault(f"expected a hello: {error}") from error


def check_hello(hello: Hello, local: LocalRank) -> PlannedLink:
    """The link that this hello is for.

    Raises:
        HandoffFault: (stale_epoch) it is for another epoch of this worker; (protocol) versions or plans differ.
        IncompatiblePools: the two pools cannot exchange blocks.
    """
    attach = local.attach
    if not attach.oldest_protocol <= hello.protocol <= attach.protocol:
        supported = f"{attach.oldest_protocol} to {attach.protocol}"
        raise protocol_fault(f"protocol: expected a version from {supported}, got {hello.protocol}")
    meant, ours = (hello.to_worker, hello.to_epoch, hello.to_rank), (attach.worker_id, attach.epoch, attach.rank)
    if meant != ours:
        raise HandoffFault(HandoffCause.STALE_EPOCH, f"the link is for {meant}, but this is {ours}")
    if not 0 < hello.tp <= MAX_TP or not 0 <= hello.rank < hello.tp:
        raise protocol_fault(f"rank: expected 0 <= rank < tp <= {MAX_TP}, got rank {hello.rank} of {hello.tp}")
    pool_layout(hello.layout)
    check_compatible(
        _shape(hello, hello.protocol),
        _shape(attach, attach.oldest_protocol),
    )
    if hello.int8 and not attach.int8:
        raise IncompatiblePools(
            "wire_dtype: expected the pool's dtype, got int8; set the same transfer.wire_dtype on both workers",
            field="wire_dtype",
        )
    for link in reshard_plan(hello.tp, attach.tp, attach.model_kv_heads):
        if (link.prefill_rank, link.decode_rank) == (hello.rank, attach.rank):
            if (link.head_start, link.head_count, link.src_head, link.dst_head) != hello.link:
                raise protocol_fault(f"plan: expected {link}, the sender has {hello.link}")
            if link.src_head + link.head_count > hello.layout.kv_heads:
                raise protocol_fault("plan: the sender's pool lacks heads of its rank")
            return link
    raise IncompatiblePools(f"plan: prefill rank {hello.rank} sends nothing to decode rank {attach.rank}")


async def receive_answer(raw: Wire, timeout_s: float) -> Welcome:
    """The receiver's answer to our hello.

    Raises:
        LinkRefused: permanently.
        HandoffFault: (protocol) it is not a valid answer.
        OSError, TimeoutError: the connection failed, or no answer arrived.
    """
    async with asyncio.timeout(timeout_s):
        body, _ = await receive_first(raw)
    try:
        answer = _ANSWERS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise protocol_fault(f"expected an answer to our hello: {error}") from error
    if isinstance(answer, Refused):
        raise LinkRefused(answer.reason)
    return answer


class LinkRefused(IncompatiblePools):
    """The peer refuses this link for as long as both epochs last."""


def _shape(side: Hello | AttachPool, oldest_protocol: int) -> Shape:
    layout = side.layout
    return Shape(
        model_fingerprint=side.model_fingerprint,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=side.model_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        tp=side.tp,
        adapter=layout.adapter,
        joined=layout.joined,
        packed=layout.packed,
        protocol=side.protocol,
        oldest_protocol=oldest_protocol,
    )
