"""RDMA fabrics through the NIXL library (an optional extra): the receiver reads announced pieces from the sender's
pool, in host or device memory.

It works like `mapped` over a network: one-sided reads into the receiver's staging, from which it copies them into its
blocks once the session allows it. So no late write can occur, and no other host can write to a pool. A process
registers its pool and its staging once. The sender's NIXL metadata is sent over a connection that presents the
welcome's token. UCX's own configuration selects the network (`UCX_NET_DEVICES`, `UCX_TLS`).
"""

from __future__ import annotations

import importlib
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.data_socket import TOKEN_BYTES, DataListener, DataSocket, connect_data
from kvtransfer.connection.handshake import KEY_BITS, MULTILINEAR, XXH3, Hello, LocalRank, Welcome, pool_layout
from kvtransfer.connection.sockets import join_address, split_address
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.pool import PoolMap, PoolSpan, check_span
from kvtransfer.pool.staging import LeaseLost
from kvtransfer.session.piece import Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.mapped import MappedSender, unpack_ids
from kvtransfer.transports.protocol import PROBE_BYTES, WelcomeTerms
from kvtransfer.transports.threads import LinkThread
from tandem.kvcache.layout import KvPoolLayout

if TYPE_CHECKING:
    from kvtransfer.pool.device_digest import DigestKeys

PACKAGE = "nixl"
MAX_IDLE_S = 20.0
MAX_METADATA_BYTES = 64 << 10
POLL_S = 20e-6  # the library has no event to wait for
_HOST_MEMORY, _DEVICE_MEMORY = "DRAM", "VRAM"
_HEAD = struct.Struct("<QQI")  # addresses of pool and probe at the sender; bytes of the metadata that follows

Runs = npt.NDArray[np.uint64]
T = TypeVar("T")


class NixlEndpoint:
    """The NIXL agent of a process, with its registered memory: the pool, staging, and a probe. Thread-safe."""

    def __init__(self, local: LocalRank) -> None:
        self.probe = np.frombuffer(secrets.token_bytes(PROBE_BYTES), np.uint8)
        self.device = 0
        if isinstance(pool := local.pool, PoolMap):
            self._memory = _HOST_MEMORY
            self.pool_address, pool_bytes = pool.blocks.ctypes.data, pool.blocks.nbytes
            device_regions: list[tuple[int, int, int, str]] = []
        else:
            self._memory = _DEVICE_MEMORY
            self.device = pool.device.index or 0
            self.pool_address, pool_bytes = pool.words.data_ptr(), pool.words.nbytes
            area = pool.staging.area
            device_regions = [(area.data_ptr(), area.nbytes, self.device, "")]
        host = local.staging.area
        host_regions = [(each.ctypes.data, each.nbytes, 0, "") for each in (self.probe, host)]
        api = importlib.import_module(f"{PACKAGE}._api")
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # all links of the process use it
        try:
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            self._agent: Any = api.nixl_agent(secrets.token_hex(16), config)
            self._agent.register_memory(
                [(self.pool_address, pool_bytes, self.device, ""), *device_regions], self._memory
            )
            self._agent.register_memory(host_regions, _HOST_MEMORY)
        except Exception as error:  # the library's errors have no common type
            raise _broken("cannot start", error) from error
        self._peers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def introduction(self) -> bytes:
        metadata = bytes(self._agent.get_agent_metadata())
        return _HEAD.pack(self.pool_address, self.probe.ctypes.data, len(metadata)) + metadata

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer's name. Each call needs a `remove_peer`."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:  # the library's errors have no common type
                raise _broken("rejected the metadata", error) from error
            found: str = name.decode() if isinstance(name, bytes) else name
            self._peers[found] += 1
        return found

    def remove_peer(self, name: str) -> None:
        with self._lock:
            self._peers[name] -= 1
            if self._peers[name]:
                return
            del self._peers[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception:  # the peer may be gone
                pass

    def read(self, peer: RemotePool, runs: Runs, address: int, is_closed: Callable[[], bool], idle_s: float) -> None:
        """Reads `runs` (address, bytes) of the peer's pool consecutively to `address`.

        Raises:
            LeaseLost: failure, timeout, or the link was closed, after the read began: the library may still write.
            HandoffFault: (transport) it did not begin.
        """
        memory = self._memory if peer.in_pool else _HOST_MEMORY
        try:
            self._read(peer, runs, address, memory, is_closed, time.monotonic() + idle_s)
        except HandoffFault:
            raise
        except Exception as error:  # the library's errors have no common type
            raise _broken("failed", error) from error

    def _read(
        self, peer: RemotePool, runs: Runs, address: int, memory: str, is_closed: Callable[[], bool], deadline_s: float
    ) -> None:
        agent = self._agent
        starts = np.uint64(address) + np.cumsum(runs[:, 1], dtype=np.uint64) - runs[:, 1]
        ours, theirs = (self.device, peer.device) if memory == _DEVICE_MEMORY else (0, 0)
        local = agent.get_xfer_descs(_descriptors(starts, runs[:, 1], ours), memory)
        remote = agent.get_xfer_descs(_descriptors(runs[:, 0], runs[:, 1], theirs), memory)
        handle = agent.initialize_xfer("READ", local, remote, peer.name)
        try:
            state = agent.transfer(handle)
            while state == "PROC" and not is_closed() and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as error:
            raise LeaseLost(f"nixl: a read failed: {type(error).__name__}: {str(error)[:200]}") from error
        if state != "DONE":  # a cancelled read may still be in the network
            raise LeaseLost(f"nixl: a read ended in state {state}: the link was closed, the read timed out or failed")


@dataclass(frozen=True, slots=True)
class RemotePool:
    """The peer of a link. `in_pool`: reads are from its pool, else from its probe."""

    name: str
    pool_address: int
    probe_address: int
    device: int
    in_pool: bool = True


class NixlSender(MappedSender):
    """Announces pieces like `mapped`, with our physical blocks. Their digests are always in the announcement."""

    digests_follow = False

    def __init__(
        self, local: LocalRank, thread: LinkThread, peer_address: str, endpoint: Callable[[LocalRank], NixlEndpoint]
    ) -> None:
        super().__init__(local, thread)
        self._host, _ = split_address(peer_address)
        self._make_endpoint = endpoint
        self._data: DataSocket | None = None

    def hello_fds(self) -> list[int]:
        return []

    async def establish(self, welcome: Welcome) -> None:
        await super().establish(welcome)
        if welcome.data_port is None or len(welcome.data_token) != TOKEN_BYTES:
            raise protocol_fault(f"nixl: expected the data port and its token of {TOKEN_BYTES} bytes in the welcome")
        address = join_address(self._host, welcome.data_port)
        self._data = await connect_data(address, welcome.data_token, self._local.tls, MAX_IDLE_S)
        await self._thread.run(self._introduce, self._data)

    def _introduce(self, data: DataSocket) -> None:
        endpoint = self._make_endpoint(self._local)
        self._probe = endpoint.probe.tobytes()
        data.send([memoryview(endpoint.introduction())])

    def close(self) -> None:
        if self._data is not None:
            self._data.close()


class NixlReceiver:
    places_ahead = False

    def __init__(
        self,
        local: LocalRank,
        thread: LinkThread,
        hello: Hello,
        link: PlannedLink,
        endpoint: Callable[[LocalRank], NixlEndpoint],
        *,
        digests: bool,
    ) -> None:
        self._local = local
        self._thread = thread
        self._layout = pool_layout(hello.layout)
        self._device = hello.device_index
        self._link = link
        self._digests = digests
        self._kind = MULTILINEAR if local.device else XXH3
        if self._kind not in hello.digest_kinds:
            raise protocol_fault(f"nixl: expected digests of kind {self._kind}, got {hello.digest_kinds}")
        self._make_endpoint = endpoint
        self._endpoint: NixlEndpoint | None = None
        self._keys: DigestKeys | None = None
        self._peer: RemotePool | None = None
        self._idle_s = min(local.attach.ticket_ttl_s, MAX_IDLE_S)
        self._listener: DataListener | None = None
        self._data: DataSocket | None = None
        self.is_closed = False
        self._reading = threading.Lock()

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        if fds:
            raise protocol_fault("nixl: expected no descriptors with the hello")
        self._listener = DataListener(self._local.attach.bind_host, self._local.tls)
        key = secrets.randbits(KEY_BITS) if self._local.device else 0
        if not isinstance(pool := self._local.pool, PoolMap) and self._digests:
            self._keys = await self._thread.run(pool.make_keys, key)
        return WelcomeTerms(self._listener.port, self._listener.token, self._kind, key)

    async def establish(self) -> None:
        if self._listener is None:
            raise protocol_fault("nixl: no data port was prepared")
        self._data = await self._listener.admit(MAX_IDLE_S)
        await self._thread.run(self._meet, self._data)

    def _meet(self, data: DataSocket) -> None:
        head = bytearray(_HEAD.size)
        data.receive([memoryview(head)])
        pool_address, probe_address, size = _HEAD.unpack(head)
        if size > MAX_METADATA_BYTES:
            raise protocol_fault(f"nixl: expected at most {MAX_METADATA_BYTES} bytes of metadata, got {size}")
        metadata = bytearray(size)
        data.receive([memoryview(metadata)])
        self._endpoint = self._make_endpoint(self._local)
        name = self._endpoint.add_peer(bytes(metadata))
        self._peer = RemotePool(name, pool_address, probe_address, self._device)

    async def receive_probe(self) -> int:
        return await self._thread.run(self._receive_probe)

    def _receive_probe(self) -> int:
        peer = replace(_open(self._peer), in_pool=False)
        runs = np.array([[peer.probe_address, PROBE_BYTES]], np.uint64)
        with self._local.staging.lease(PROBE_BYTES, receives=True) as data:
            self._read(peer, runs, data.ctypes.data)
            return digest_of_bytes(data.data)

    async def fetch(self, piece: Piece, body: bytes) -> NixlArrival:
        read = PoolSpan(
            unpack_ids(body, piece.block_count),
            piece.last_block_tokens,
            piece.layer_start,
            piece.layer_count,
            self._link.src_head + piece.head_start - self._link.head_start,
            piece.head_count,
        )
        check_span(self._layout, read)
        runs = runs_of(self._layout, read)
        runs[:, 0] += np.uint64(_open(self._peer).pool_address)
        return NixlArrival(self, runs, piece)

    async def place(self, runs: Runs, piece: Piece, span: PoolSpan) -> int:
        return await self._thread.run(self._place, runs, piece, span)

    def _place(self, runs: Runs, piece: Piece, span: PoolSpan) -> int:
        local, size, peer = self._local, piece.payload_bytes, _open(self._peer)
        if isinstance(pool := local.pool, PoolMap):
            with local.staging.lease(size, receives=True) as data:
                self._read(peer, runs, data.ctypes.data)
                pool.unpack(data, span)
                return digest_of_bytes(data.data) if self._digests else 0
        with pool.staging.lease(size, receives=True) as staged:
            self._read(peer, runs, staged.data_ptr())
            digest = 0 if self._keys is None else pool.digest_packed(staged, span, self._keys)
            if piece.digest in (None, digest):
                pool.unpack(staged, span)
            return digest

    def _read(self, peer: RemotePool, runs: Runs, address: int) -> None:
        with self._thread.waiting(), self._reading:
            _open(self._endpoint).read(peer, runs, address, lambda: self.is_closed, self._idle_s)

    def close(self) -> None:
        self.is_closed = True
        if self._listener is not None:
            self._listener.close()
        if self._data is not None:
            self._data.close()
        if self._endpoint is not None and self._peer is not None:
            ending = (self._endpoint, self._peer.name)
            threading.Thread(target=self._forget, args=ending, name="nixl-end", daemon=True).start()  # it may block
            self._peer = None

    def _forget(self, endpoint: NixlEndpoint, name: str) -> None:
        with self._reading:
            endpoint.remove_peer(name)


@dataclass(frozen=True, slots=True)
class NixlArrival:
    digest_follows = False

    receiver: NixlReceiver
    runs: Runs
    piece: Piece

    async def place(self, span: PoolSpan) -> int:
        return await self.receiver.place(self.runs, self.piece, span)

    async def discard(self) -> None:
        """Does nothing: no byte was read."""


def _open(part: T | None) -> T:
    if part is None:
        raise HandoffFault(HandoffCause.TRANSPORT, "nixl: the link is closed")
    return part


def runs_of(layout: KvPoolLayout, span: PoolSpan) -> Runs:
    """(offset, bytes) in a pool of this layout, in canonical order, as in `PoolMap.slices`."""
    partial = span.last_block_tokens < layout.block_tokens
    full = np.array(span.block_ids[: len(span.block_ids) - partial], np.uint64)
    whole_layers = span.head_count == layout.kv_heads
    within = _within(layout, span, 0 if whole_layers else 1)
    size = span.layer_count * layout.layer_bytes if whole_layers else span.head_count * layout.head_bytes
    parts = [_crossed(layout, full, within, size)]
    if partial:
        last = np.array(span.block_ids[-1:], np.uint64)
        parts.append(_crossed(layout, last, _within(layout, span, 2), span.last_block_tokens * layout.token_bytes))
    return np.concatenate(parts)


def _within(layout: KvPoolLayout, span: PoolSpan, depth: int) -> npt.NDArray[np.uint64]:
    """Offsets in a block, by depth: of all layers (0), of each side of each layer (1), or of each head (2)."""
    first = span.layer_start * layout.layer_bytes
    if depth == 0:
        return np.array([first], np.uint64)
    side_bytes = np.uint64(layout.kv_heads * layout.head_bytes)
    sides = first + np.arange(layout.sides * span.layer_count, dtype=np.uint64) * side_bytes
    heads = np.arange(span.head_start, span.head_start + (span.head_count if depth == 2 else 1), dtype=np.uint64)
    offsets: npt.NDArray[np.uint64] = (sides[:, None] + heads[None, :] * np.uint64(layout.head_bytes)).reshape(-1)
    return offsets


def _crossed(layout: KvPoolLayout, blocks: Runs, within: Runs, size: int) -> Runs:
    offsets = (blocks[:, None] * np.uint64(layout.block_bytes) + within[None, :]).reshape(-1)
    return np.stack([offsets, np.full(len(offsets), size, np.uint64)], axis=1)


def _descriptors(addresses: Runs, sizes: Runs, device: int) -> Runs:
    """Descriptors in NIXL's form: (address, bytes, device)."""
    return np.stack([addresses, sizes, np.full(len(sizes), device, np.uint64)], axis=1).astype(np.uint64)


def _broken(what: str, error: Exception) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"nixl: {what}: {type(error).__name__}: {str(error)[:200]}")
