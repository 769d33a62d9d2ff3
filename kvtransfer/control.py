"""Messages between a rank and its transfer agent, over `tandem.rpc.channel` on the agent's unix socket.

Every rank connects to its own agent and attaches its pool. The leader (rank 0) also connects to the agents of all ranks
of the worker, to open and close handoffs. `ticket_id` (hex) identifies a ticket.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvtransfer.stages import ReceiveStages, SendStages
from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

HOST_DEVICE = "cpu"
IPC_HANDLE_BYTES = 64


class WireLayout(msgspec.Struct, frozen=True):
    """KvPoolLayout on the wire, with further fields that the handshake compares."""

    num_blocks: int
    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    adapter: str = ""
    joined: bool = False
    packed: bool = False


class DeviceMemory(msgspec.Struct, frozen=True):
    """A pool in device memory: `size_bytes` at `offset` in another process's allocation.

    `device` is a GPU's UUID and `handle` the allocation's CUDA IPC handle. With HOST_DEVICE the pool is the file sent
    with the message, so that the device code runs without a GPU.
    """

    device: str
    size_bytes: int
    handle: bytes = b""
    offset: int = 0


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files, and the identity (a URI) required of a peer's certificate, if any."""

    cert: str
    key: str
    ca: str
    peer: str | None = None


class AttachPool(msgspec.Struct, frozen=True, tag=True):
    """A rank's first message on its own agent's socket. It carries the pool's file descriptor (SCM_RIGHTS), unless the
    pool is in GPU memory."""

    worker_id: str
    epoch: int
    rank: int
    tp: int
    model_kv_heads: int
    model_fingerprint: str
    layout: WireLayout
    ticket_key: bytes
    digests: bool
    transport: str
    bind_host: str
    link_socket: str
    ticket_ttl_s: float
    protocol: int = PROTOCOL_VERSION
    oldest_protocol: int = OLDEST_PROTOCOL_VERSION
    tls: TlsFiles | None = None  # encrypts every TCP connection and refuses others
    int8: bool = False
    """Links that carry bytes send int8 (see kvtransfer.pool.quantise). Both ends must have it set."""
    memory: DeviceMemory | None = None
    """Location of the pool; None: host memory."""


class Lead(msgspec.Struct, frozen=True, tag=True):
    """The leader's first message on an agent's socket. The agent reports tickets and links on this connection."""


class Peer(msgspec.Struct, frozen=True):
    """One agent of another worker, from the controller's directory."""

    worker_id: str
    epoch: int
    rank: int
    tp: int
    host_id: str
    mapped_path: str
    tcp_address: str
    protocol: int = PROTOCOL_VERSION
    oldest_protocol: int = OLDEST_PROTOCOL_VERSION
    device: str = ""
    """As in DeviceMemory; empty: host memory."""
    machine_id: str = ""
    """Equal in all containers of one machine."""
    transports: tuple[str, ...] = ()
    """What it accepts; empty: an earlier release, which does not say."""
    connect: bool = True
    """Connect at once. False: connect only while a ticket needs the link."""

    def is_at(self, other: Peer) -> bool:
        """Whether both are the same agent at the same addresses."""
        return msgspec.structs.replace(self, connect=other.connect) == other


class SetPeers(msgspec.Struct, frozen=True, tag=True):
    """All agents that this one may exchange blocks with, when the leader connects."""

    peers: tuple[Peer, ...]


class ChangePeers(msgspec.Struct, frozen=True, tag=True):
    """What changed since: worker epochs whose agents are others now, each with all its agents, and those that left."""

    changed: tuple[Peer, ...]
    gone: tuple[tuple[str, int], ...]


class OpenReceive(msgspec.Struct, frozen=True, tag=True):
    """Permits writes of logical blocks [first_block, first_block + len(block_ids)) of a prompt to `block_ids`."""

    ticket_id: str
    prefill_worker: str
    prefill_epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    prompt_tokens: int


class CloseReceive(msgspec.Struct, frozen=True, tag=True):
    """Stops writes for this ticket. Always answered by ReceiveClosed, after which its blocks may be reused."""

    ticket_id: str


class OpenSend(msgspec.Struct, frozen=True, tag=True):
    """A ticket to send for. `export_id` is the request id of this rank's ExportRanges."""

    ticket_id: str
    signed_ticket: bytes
    export_id: str
    decode_worker: str
    decode_epoch: int
    first_block: int
    prompt_tokens: int


class CloseSend(msgspec.Struct, frozen=True, tag=True):
    """Stops sending. Always answered by SendClosed, after which the receiver no longer reads our blocks."""

    ticket_id: str


class Range(msgspec.Struct, frozen=True):
    """tandem.engine.api.ExportRange on the wire."""

    export_id: str
    first_block: int
    block_ids: tuple[int, ...]
    last_block_tokens: int
    in_cache: bool
    is_last: bool


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    ranges: tuple[Range, ...]


class LayerDone(msgspec.Struct, frozen=True, tag=True):
    """This layer of the current step's ranges is in the pool, and so are all layers before it."""

    layer: int


class StillComputing(msgspec.Struct, frozen=True, tag=True):
    """From the leader in a long step: prompts whose layers are not all in the pool are late, and not lost."""


class TakeCensus(msgspec.Struct, frozen=True, tag=True):
    """The leader's request for a Census."""


ToAgent = (
    AttachPool | BeginStep | LayerDone | Lead | SetPeers | ChangePeers | StillComputing | TakeCensus
    | OpenReceive | CloseReceive | OpenSend | CloseSend
)  # fmt: skip


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Answer to AttachPool: the addresses at which peers reach this agent."""

    host_id: str
    mapped_path: str
    tcp_address: str
    device: str = ""  # as in Peer
    machine_id: str = ""  # as in Peer
    transports: tuple[str, ...] = ()  # as in Peer


class Received(msgspec.Struct, frozen=True, tag=True):
    """All blocks of the ticket are in this rank's pool, with correct digests. Nothing more is written."""

    ticket_id: str
    bytes: int
    blocks: int
    pieces: int
    verify_s: float
    stages: ReceiveStages | None = None  # None: nothing to receive
    transports: tuple[str, ...] = ()  # of the links that carried the blocks


class ReceiveFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is written for this ticket. `cause` is a HandoffCause."""

    ticket_id: str
    cause: str
    message: str


class ReceiveClosed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Every piece was acknowledged; the blocks may be released."""

    ticket_id: str
    bytes: int
    pieces: int
    stages: SendStages | None = None  # None: nothing to send


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str
    cause: str
    message: str


class SendClosed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str


class LinkState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    IDLE = "idle"  # was ready, and opens again when needed
    REFUSED = "refused"
    DOWN = "down"
    CLOSED = "closed"  # no longer wanted


REACHABLE = (LinkState.READY, LinkState.IDLE)


class LinkReport(msgspec.Struct, frozen=True, tag=True):
    peer_worker: str
    peer_epoch: int
    peer_rank: int
    transport: str
    state: LinkState
    reason: str
    bytes: int
    latency_s: float | None = None  # as in LinkMeter; None at the receiving end, which does not measure
    bytes_per_s: float | None = None


class Census(msgspec.Struct, frozen=True, tag=True):
    """Number of unfinished tickets (`waiting`: for their decode worker to appear in the directory) and of ready
    links."""

    sending: int
    receiving: int
    waiting: int
    links_out: int
    links_in: int


FromAgent = Attached | Received | ReceiveFailed | ReceiveClosed | Sent | SendFailed | SendClosed | LinkReport | Census
