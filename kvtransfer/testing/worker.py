"""Workers without an engine, for tests: real agent processes, numpy pools in memfds, and random KV."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kvtransfer.agent.client import AgentClient
from kvtransfer.agent.env import AGENT_ENV
from kvtransfer.control import (
    Attached,
    AttachPool,
    FromAgent,
    Lead,
    LinkReport,
    Peer,
    SetPeers,
    TlsFiles,
    WireLayout,
)
from kvtransfer.pool.pool import Bytes
from kvtransfer.session.reshard import heads_of_rank
from kvtransfer.testing.pool import FakePool
from kvtransfer.versions import PROTOCOL_VERSION
from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.testing.fork import ForkServer, Process

M = TypeVar("M", bound=msgspec.Struct)
WAIT_S = 90.0  # of a busy machine
FINGERPRINT = "test-model"


@dataclass(frozen=True, slots=True)
class FakeModel:
    layers: int = 3
    kv_heads: int = 4
    block_tokens: int = 4
    head_dim: int = 8
    dtype: str = "float32"
    fingerprint: str = FINGERPRINT
    joined: bool = False
    packed: bool = False


class FakeKv:
    """The whole model's KV of one prompt: u8 [block, layer, side, kv_head, block_tokens, token_bytes]."""

    def __init__(self, model: FakeModel, tokens: int, seed: int = 0) -> None:
        self.tokens = tokens
        self.blocks = blocks_for(tokens, model.block_tokens)
        layout = KvPoolLayout(1, 1, 1, 1, model.head_dim, model.dtype, model.joined, model.packed)
        self._shape = (
            self.blocks, model.layers, layout.sides, model.kv_heads, model.block_tokens, layout.token_bytes
        )  # fmt: skip
        self._seed = seed

    @cached_property
    def data(self) -> Bytes:
        return np.random.default_rng(self._seed).integers(0, 256, self._shape, np.uint8)

    @property
    def size_bytes(self) -> int:
        return math.prod(self._shape)


@cache
def agents() -> ForkServer:
    """For all tests of a process: most of an agent's start is imports."""
    server = ForkServer("kvtransfer.testing.agent", env=AGENT_ENV | {"PYTHONPATH": os.pathsep.join(sys.path)})
    atexit.register(server.close)
    return server


class FakeRank:
    """One rank with its pool and its agent process."""

    def __init__(self, worker: FakeWorker, rank: int) -> None:
        model = worker.model
        self.worker = worker
        self.rank = rank
        self.heads = heads_of_rank(worker.tp, model.kv_heads, rank)
        self.layout = KvPoolLayout(
            worker.num_blocks, model.layers, len(self.heads), model.block_tokens, model.head_dim, model.dtype,
            model.joined,
            model.packed,
        )  # fmt: skip
        self.memory = FakePool(self.layout, worker.device)
        self.fd, self.pool = self.memory.fd, self.memory.pool
        self.socket_path = worker.folder / f"agent-{rank}.sock"
        self.link_path = worker.folder / f"link-{rank}.sock"
        self.messages: list[FromAgent] = []
        self.lost = 0
        self.is_connected = False
        self.is_stopped = False
        self.is_gone = False  # it died, and its agent with it
        self.listener: Callable[[FromAgent | None], None] | None = None  # None: the agent is gone
        self._changed = asyncio.Condition()
        self._local = AgentClient(asyncio.get_running_loop())
        self._lead = AgentClient(asyncio.get_running_loop())
        self._tasks: set[asyncio.Task[None]] = set()
        self.process = self.start_agent()

    def start_agent(self, *launcher: str) -> Process:
        """Starts or restarts the agent. `launcher` replaces the module and its arguments, to inject faults."""
        if self.worker.host is not None:
            return self.worker.host
        module, *others = launcher or self.worker.launcher
        arguments = [*others, "--socket", str(self.socket_path)]
        environment = os.environ | AGENT_ENV | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if self.worker.own_processes:
            self.process = subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment)
        else:
            self.process = agents().start(module, arguments, self.log, environment)
        return self.process

    @property
    def log(self) -> Path:
        """What its agents wrote."""
        return self.socket_path.with_suffix(".log")

    def connect(self) -> None:
        self._local.connect(self.socket_path, self.attach_message(), self.fd, lambda message: None, lambda: None)
        self._lead.connect(self.socket_path, Lead(), None, self._on_message, self._on_lost)

    def attach_message(self) -> AttachPool:
        worker, layout = self.worker, self.layout
        return AttachPool(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            rank=self.rank,
            tp=worker.tp,
            model_kv_heads=worker.model.kv_heads,
            model_fingerprint=worker.model.fingerprint,
            layout=WireLayout(
                layout.num_blocks,
                layout.layers,
                layout.kv_heads,
                layout.block_tokens,
                layout.head_dim,
                layout.dtype,
                joined=layout.joined,
                packed=layout.packed,
            ),
            ticket_key=worker.key,
            digests=worker.digests,
            transport=worker.transport,
            bind_host="127.0.0.1",
            link_socket=str(self.link_path),
            ticket_ttl_s=worker.ttl_s,
            protocol=worker.protocol,
            int8=worker.int8,
            tls=worker.tls,
            memory=self.memory.memory,
        )

    def _on_message(self, message: FromAgent) -> None:
        self.is_connected = True
        if self.listener is not None:
            self.listener(message)
            return
        self.messages.append(message)
        self._notify()

    def _on_lost(self) -> None:
        self.lost += 1
        self.is_connected = False
        if self.listener is not None:
            self.listener(None)
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send_as_leader(self, message: msgspec.Struct) -> None:
        """Sends a message as the leader."""
        self._lead.send(message)

    def send_as_rank(self, message: msgspec.Struct) -> None:
        self._local.send(message)

    def disconnect(self) -> None:
        """Simulates the rank's death."""
        self.is_gone = True
        self._local.close()

    def disconnect_leader(self) -> None:
        """Simulates the leader's death."""
        self._lead.close()

    async def expect(self, kind: type[M], *, timeout_s: float = WAIT_S, **fields: object) -> M:
        """Waits for the first report of this type with these fields, and removes it."""

        def found() -> M | None:
            for message in self.messages:
                if isinstance(message, kind) and all(getattr(message, name) == it for name, it in fields.items()):
                    self.messages.remove(message)
                    return message
            return None

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while (message := found()) is None:
                    await self._changed.wait()
        except TimeoutError as error:
            if self.log.exists():
                error.add_note(self.log.read_text()[-4000:])
            raise
        return message

    def write(self, kv: FakeKv, block_ids: Sequence[int], first: int = 0, layers: slice = slice(None)) -> None:
        """Writes, as the engine, this rank's heads of the prompt's blocks from `first` on."""
        heads = slice(self.heads.start, self.heads.stop)
        self.pool.blocks[list(block_ids), layers] = kv.data[first : first + len(block_ids), layers, :, heads]
        self.memory.upload()

    def holds(self, kv: FakeKv, block_ids: Sequence[int], first: int = 0) -> bool:
        """Whether all that is to be moved of the prompt's blocks is in this rank's pool."""
        heads, block_tokens = slice(self.heads.start, self.heads.stop), self.layout.block_tokens
        self.memory.download()
        for index, block_id in enumerate(block_ids, first):
            valid = self.layout.last_tokens(kv.tokens) if index == kv.blocks - 1 else block_tokens
            mine, theirs = self.pool.blocks[block_id], kv.data[index, :, :, heads]
            if not np.array_equal(mine[..., :valid, :], theirs[..., :valid, :]):
                return False
        return True

    def stop(self) -> None:
        if self.is_stopped:
            return
        self.is_gone = self.is_stopped = True
        self._local.close()
        self._lead.close()
        if self.worker.host is None:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait(10.0)
        self.memory.close()


class FakeWorker:
    """All ranks of one epoch of a worker."""

    def __init__(
        self,
        folder: Path,
        worker_id: str,
        model: FakeModel,
        *,
        tp: int = 1,
        num_blocks: int = 32,
        transport: str = "auto",
        digests: bool = True,
        connects: bool = False,
        ttl_s: float = 30.0,  # of a busy machine
        launcher: tuple[str, ...] = ("kvtransfer.agent",),
        protocol: int = PROTOCOL_VERSION,
        int8: bool = False,
        tls: TlsFiles | None = None,
        device: str = "",
        host: Process | None = None,
        own_processes: bool = False,  # started as in production, for figures of a process
    ) -> None:
        self.host = host  # a process that runs the agents; None: each has its own
        self.own_processes = own_processes
        self.folder = folder / worker_id
        self.folder.mkdir(mode=0o700, exist_ok=True)  # an earlier epoch may have created it
        self.worker_id = worker_id
        self.epoch = secrets.randbits(62) + 1
        self.model = model
        self.tp = tp
        self.num_blocks = num_blocks
        self.transport = transport
        self.digests = digests
        self.connects = connects
        self.ttl_s = ttl_s
        self.launcher = launcher
        self.tls = tls
        self.device = device  # as in FakePool
        self.protocol = protocol  # the newest supported version
        self.int8 = int8
        self.key = secrets.token_bytes(32)
        self.attached: dict[int, Attached] = {}
        self.ranks = [FakeRank(self, rank) for rank in range(tp)]

    async def attach(self) -> None:
        for rank in self.ranks:
            rank.connect()
        for rank in self.ranks:
            self.attached[rank.rank] = await rank.expect(Attached)

    def peers(self) -> tuple[Peer, ...]:
        return tuple(
            Peer(
                self.worker_id,
                self.epoch,
                rank,
                self.tp,
                it.host_id,
                it.mapped_path,
                it.tcp_address,
                self.protocol,
                device=it.device,
                machine_id=it.machine_id,
                transports=it.transports,
            )
            for rank, it in sorted(self.attached.items())
        )

    def set_peers_of(self, *others: FakeWorker) -> None:
        peers = (peer for other in others for peer in other.peers())
        message = SetPeers(tuple(msgspec.structs.replace(peer, connect=self.connects) for peer in peers))
        for rank in self.ranks:
            rank.send_as_leader(message)

    async def linked(self, *, timeout_s: float = WAIT_S) -> None:
        """Waits until every rank has at least one ready link."""
        for rank in self.ranks:
            await rank.expect(LinkReport, state="ready", timeout_s=timeout_s)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
