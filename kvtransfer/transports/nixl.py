"""RDMA fabrics through the NIXL library (an optional extra): the receiver reads announced pieces from the sender's
pool.

It works like `mapped` over a network: one-sided reads into a staging buffer of the receiver, which copies them into its
blocks once the session allows it. So no late write can occur, and no other host can write to a pool. The sender's NIXL
metadata is sent over a connection that presents the welcome's token. UCX's own configuration selects the network
(`UCX_NET_DEVICES`, `UCX_TLS`).
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.data_socket import TOKEN_BYTES, DataListener, DataSocket, connect_data
from kvtransfer.connection.handshake import Hello, LocalRank, Welcome, pool_layout
from kvtransfer.connection.sockets import join_address, split_address
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan, check_span, make_staging
from kvtransfer.pool.pools import Pool
from kvtransfer.session.piece import MAX_PIECE_BYTES, Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.mapped import MappedSender, unpack_ids
from kvtransfer.transports.protocol import PROBE_BYTES, LinkThread, WelcomeTerms
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout

PACKAGE = "nixl"
MAX_IDLE_S = 20.0
MAX_METADATA_BYTES = 64 << 10
POLL_S = 20e-6  # the library has no event to wait for
_MEMORY = "DRAM"
_HEAD = struct.Struct("<QQI")  # addresses of pool and probe at the sender; bytes of the metadata that follows

Runs = npt.NDArray[np.uint64]


def check_nixl() -> None:
    """Raises ConfigError that names the missing package and how to install it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"transfer.transport: nixl needs the package {PACKAGE}, which is not installed: pip install "
            "'tandem-serve[nixl]', or choose another transport",
            field="transfer.transport",
        )


class NixlEndpoint:
    """A NIXL agent for one end of one link, with its registered memory. Used in the link's thread; `close` from any
    thread."""

    def __init__(self, *memory: Bytes) -> None:
        api = importlib.import_module(f"{PACKAGE}._api")
        try:
            self._agent: Any = api.nixl_agent(secrets.token_hex(16), api.nixl_agent_config(backends=["UCX"]))
            regions = [(each.ctypes.data, each.nbytes, 0, "") for each in memory]
            self._registered: Any = self._agent.register_memory(regions, _MEMORY)
        except Exception as error:  # the library's errors have no common type
            raise _broken("cannot start", error) from error
        self._memory = memory
        self._peer: str | None = None
        self._lock = threading.Lock()
        self._in_use = False
        self._closed = False

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> None:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:  # the library's errors have no common type
            raise _broken("rejected the metadata", error) from error
        self._peer = name.decode() if isinstance(name, bytes) else name

    def read(self, runs: Runs, into: Bytes, idle_s: float) -> None:
        """Reads the peer's `runs` (address, bytes) consecutively into `into`.

        Raises:
            HandoffFault: (transport) failure, timeout, or the link was closed.
        """
        with self._lock:
            if self._closed or self._peer is None:
                raise HandoffFault(HandoffCause.TRANSPORT, "nixl: the link is closed")
            self._in_use = True
        try:
            self._read(runs, into, time.monotonic() + idle_s)
        except HandoffFault:
            raise
        except Exception as error:  # the library's errors have no common type
            raise _broken("failed", error) from error
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._end()

    def _read(self, runs: Runs, into: Bytes, deadline_s: float) -> None:
        agent = self._agent
        ends = np.cumsum(runs[:, 1], dtype=np.uint64)
        starts = into.ctypes.data + ends - runs[:, 1]
        local = agent.get_xfer_descs(_descriptors(starts, runs[:, 1]), _MEMORY)
        remote = agent.get_xfer_descs(_descriptors(runs[:, 0], runs[:, 1]), _MEMORY)
        handle = agent.initialize_xfer("READ", local, remote, self._peer)
        state = agent.transfer(handle)
        while state == "PROC" and not self._closed and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        if state == "PROC":
            self._abandon(handle)
            raise HandoffFault(
                HandoffCause.TRANSPORT, "nixl: a read was abandoned: the link was closed, or the read timed out"
            )
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise HandoffFault(HandoffCause.PEER_LOST, f"nixl: a read ended in state {state}")

    def _abandon(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # a transfer that cannot be cancelled needs its memory until the process ends
            _abandoned.append((self._agent, self._memory, self._registered, handle))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._in_use:
                threading.Thread(target=self._end, name="nixl-end", daemon=True).start()  # it may block

    def _end(self) -> None:
        if any(agent is self._agent for agent, *_ in _abandoned):
            return
        try:
            if self._peer is not None:
                self._agent.remove_remote_agent(self._peer)
            self._agent.deregister_memory(self._registered)
        except Exception:  # the peer may be gone; the library frees the rest with the agent
            pass


_abandoned: list[tuple[Any, ...]] = []


class NixlSender(MappedSender):
    """Announces pieces like `mapped`, with our physical blocks. Their digests are always in the announcement."""

    digests_follow = False

    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str) -> None:
        super().__init__(local, thread)
        self._host, _ = split_address(peer_address)
        self._endpoint: NixlEndpoint | None = None
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
        if not isinstance(self._local.pool, PoolMap):
            raise protocol_fault("nixl: expected a pool in host memory; device memory cannot be registered")
        pool = self._local.pool.blocks.reshape(-1)
        probe = np.frombuffer(self._probe, np.uint8)
        self._endpoint = NixlEndpoint(pool, probe)
        metadata = self._endpoint.metadata()
        head = _HEAD.pack(pool.ctypes.data, probe.ctypes.data, len(metadata))
        data.send([memoryview(head), memoryview(metadata)])

    def close(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._endpoint is not None:
            self._endpoint.close()


class NixlReceiver:
    places_ahead = False

    def __init__(self, local: LocalRank, thread: LinkThread, hello: Hello, link: PlannedLink, *, digests: bool) -> None:
        self._local = local
        self._thread = thread
        self._layout = pool_layout(hello.layout)
        self._link = link
        self._digests = digests
        self._idle_s = min(local.attach.ticket_ttl_s, MAX_IDLE_S)
        self._listener: DataListener | None = None
        self._data: DataSocket | None = None
        self._endpoint: NixlEndpoint | None = None
        self._staging = make_staging(max(MAX_PIECE_BYTES, local.layout.block_bytes))
        self._pool_address = self._probe_address = 0

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        if fds:
            raise protocol_fault("nixl: expected no descriptors with the hello")
        self._listener = DataListener(self._local.attach.bind_host, self._local.tls)
        return WelcomeTerms(self._listener.port, self._listener.token)

    async def establish(self) -> None:
        if self._listener is None:
            raise protocol_fault("nixl: no data port was prepared")
        self._data = await self._listener.admit(MAX_IDLE_S)
        await self._thread.run(self._meet, self._data)

    def _meet(self, data: DataSocket) -> None:
        head = bytearray(_HEAD.size)
        data.receive([memoryview(head)])
        self._pool_address, self._probe_address, size = _HEAD.unpack(head)
        if size > MAX_METADATA_BYTES:
            raise protocol_fault(f"nixl: expected at most {MAX_METADATA_BYTES} bytes of metadata, got {size}")
        metadata = bytearray(size)
        data.receive([memoryview(metadata)])
        self._endpoint = NixlEndpoint(self._staging)
        self._endpoint.add_peer(bytes(metadata))

    async def receive_probe(self) -> int:
        runs = _descriptors(np.array([self._probe_address], np.uint64), np.array([PROBE_BYTES], np.uint64))
        probe = await self._thread.run(self._read, runs[:, :2], PROBE_BYTES)
        return digest_of_bytes(probe.data)

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
        runs[:, 0] += np.uint64(self._pool_address)
        data = await self._thread.run(self._read, runs, piece.payload_bytes)
        return NixlArrival(self._local.pool, data, self._thread, self._digests)

    def _read(self, runs: Runs, size: int) -> Bytes:
        if self._endpoint is None:
            raise HandoffFault(HandoffCause.TRANSPORT, "nixl: the link is closed")
        data = self._staging[:size]
        self._endpoint.read(runs, data, self._idle_s)
        return data

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._data is not None:
            self._data.close()
        if self._endpoint is not None:
            self._endpoint.close()


@dataclass(frozen=True, slots=True)
class NixlArrival:
    digest_follows = False

    pool: Pool
    data: Bytes
    thread: LinkThread
    digests: bool

    async def place(self, span: PoolSpan) -> int:
        return await self.thread.run_on(self.data.nbytes, self._write, span)

    async def discard(self) -> None:
        """Does nothing: all bytes have arrived."""

    def _write(self, span: PoolSpan) -> int:
        with self.pool.on_host(span, write=True) as (pool, written):
            pool.unpack(self.data, written)
        return digest_of_bytes(self.data.data) if self.digests else 0


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
    """Offsets in a block, by depth: of all layers (0), of each layer's heads, K and V (1), or of each head (2)."""
    first = span.layer_start * layout.layer_bytes
    if depth == 0:
        return np.array([first], np.uint64)
    sides = first + np.arange(2 * span.layer_count, dtype=np.uint64) * np.uint64(layout.layer_bytes // 2)
    heads = np.arange(span.head_start, span.head_start + (span.head_count if depth == 2 else 1), dtype=np.uint64)
    offsets: npt.NDArray[np.uint64] = (sides[:, None] + heads[None, :] * np.uint64(layout.head_bytes)).reshape(-1)
    return offsets


def _crossed(layout: KvPoolLayout, blocks: Runs, within: Runs, size: int) -> Runs:
    offsets = (blocks[:, None] * np.uint64(layout.block_bytes) + within[None, :]).reshape(-1)
    return np.stack([offsets, np.full(len(offsets), size, np.uint64)], axis=1)


def _descriptors(addresses: Runs, sizes: Runs) -> Runs:
    """Descriptors in NIXL's form: (address, bytes, device)."""
    return np.stack([addresses, sizes, np.zeros(len(sizes), np.uint64)], axis=1).astype(np.uint64)


def _broken(what: str, error: Exception) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"nixl: {what}: {type(error).__name__}: {str(error)[:200]}")
