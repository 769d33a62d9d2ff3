"""What a rank and its transfer agent say to each other (over `tandem.rpc.channel`, on the agent's unix socket).

Every rank connects to its own agent and attaches its pool; its leader (rank 0) also connects to the agents of all
ranks of the worker, to open and close handoffs. Tickets are named by `ticket_id` (hex).
"""

from __future__ import annotations

import msgspec

from kvtransfer.stages import ReceiveStages, SendStages
from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

HOST_DEVICE = "cpu"
IPC_HANDLE_BYTES = 64


class WireLayout(msgspec.Struct, frozen=True):
    """KvPoolLayout on the wire, with what the handshake must also compare."""

    num_blocks: int
    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    adapter: str = ""


class DeviceMemory(msgspec.Struct, frozen=True):
    """A pool that is not in host memory: `size_bytes` from `offset` on in an allocation of another process.

    `device` is a GPU's UUID and `handle` the allocation's CUDA IPC handle. Or it is HOST_DEVICE, and the pool is the
    file beside the message: so what is made for GPUs runs without one.
    """

    device: str
    size_bytes: int
    handle: bytes = b""
    offset: int = 0


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files, and the identity (a URI) that a peer's certificate must carry, if any."""

    cert: str
    key: str
    ca: str
    peer: str | None = None


class AttachPool(msgspec.Struct, frozen=True, tag=True):
    """First message of a rank on its own agent's socket. The pool's file descriptor travels beside it (SCM_RIGHTS); a
    pool in a GPU's memory has none."""

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
    tls: TlsFiles | None = None  # every TCP connection is encrypted, and none other taken
    int8: bool = False
    """Links that carry bytes carry int8 (see kvtransfer.pool.quantise); both ends must say so."""
    memory: DeviceMemory | None = None
    """Where the pool is; None: in host memory."""


class Lead(msgspec.Struct, frozen=True, tag=True):
    """First message of the leader on an agent's socket: reports about tickets and links go to this connection."""


class Peer(msgspec.Struct, frozen=True):
    """One agent of another worker, as the controller's directory has it."""

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
    """As in DeviceMemory; empty: its pool is in host memory."""
    connect: bool = True
    """Make a link to it at once; False: only when a ticket asks for one, and while it is in use."""

    def is_at(self, other: Peer) -> bool:
        """Whether both are the same agent at the same place."""
        return msgspec.structs.replace(self, connect=other.connect) == other


class SetPeers(msgspec.Struct, frozen=True, tag=True):
    """All agents this one may exchange blocks with. Links to those that are gone end; new ones are made and probed."""

    peers: tuple[Peer, ...]


class OpenReceive(msgspec.Struct, frozen=True, tag=True):
    """Logical blocks [first_block, first_block + len(block_ids)) of a prompt may be written to `block_ids`."""

    ticket_id: str
    prefill_worker: str
    prefill_epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    prompt_tokens: int


class CloseReceive(msgspec.Struct, frozen=True, tag=True):
    """Write nothing more for this ticket. Always answered by ReceiveClosed; only then are its blocks reused."""

    ticket_id: str


class OpenSend(msgspec.Struct, frozen=True, tag=True):
    """A ticket to push for. `export_id` is the request id under which this rank's ExportRanges arrive."""

    ticket_id: str
    signed_ticket: bytes
    export_id: str
    decode_worker: str
    decode_epoch: int
    first_block: int
    prompt_tokens: int


class CloseSend(msgspec.Struct, frozen=True, tag=True):
    """Push nothing more. Always answered by SendClosed, when the receiver can no longer read our blocks."""

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
    """This layer of the current step's ranges is in the pool, with all before it."""

    layer: int


class TakeCensus(msgspec.Struct, frozen=True, tag=True):
    """From the leader: how much is open here? Answered by a Census."""


ToAgent = (
    AttachPool | BeginStep | LayerDone | Lead | SetPeers | TakeCensus
    | OpenReceive | CloseReceive | OpenSend | CloseSend
)  # fmt: skip


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Answer to AttachPool: where peers reach this agent."""

    host_id: str
    mapped_path: str
    tcp_address: str
    device: str = ""  # as in Peer


class Received(msgspec.Struct, frozen=True, tag=True):
    """Every block of the ticket is in this rank's pool, complete and with good digests. Nothing more is written."""

    ticket_id: str
    bytes: int
    blocks: int
    pieces: int
    verify_s: float
    stages: ReceiveStages | None = None  # None: there was nothing to receive


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
    stages: SendStages | None = None  # None: there was nothing to send


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str
    cause: str
    message: str


class SendClosed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str


class LinkReport(msgspec.Struct, frozen=True, tag=True):
    peer_worker: str
    peer_epoch: int
    peer_rank: int
    transport: str
    state: str  # connecting, ready, refused, down; closed: it is not wanted any more
    reason: str
    bytes: int
    latency_s: float | None = None  # as in LinkMeter; None on the receiving end, which does not measure
    bytes_per_s: float | None = None


class Census(msgspec.Struct, frozen=True, tag=True):
    """Tickets that are not over yet (`waiting`: for their decode worker to come into reach), and links that are up."""

    sending: int
    receiving: int
    waiting: int
    links_out: int
    links_in: int


FromAgent = Attached | Received | ReceiveFailed | ReceiveClosed | Sent | SendFailed | SendClosed | LinkReport | Census
