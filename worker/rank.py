"""The rank process: one device, one shard of the model, one step loop.

Rank 0 is the leader: it schedules, samples and exchanges messages with the service. The other ranks follow its steps.
Every rank attaches its KV pool to the transfer agent beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvtransfer.agent.client import AgentClient, RankExporter
from kvtransfer.control import Attached, AttachPool, FromAgent, Lead, TlsFiles, WireLayout
from kvtransfer.pool.cuda_ipc import export_tensor
from kvtransfer.transports.choice import check_available
from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from tandem.checkpoint.model_config import fingerprint
from tandem.clock import SystemClock
from tandem.config.launch import WorkerLaunch
from tandem.config.transfer import WireDtype
from tandem.engine.api import Engine, KvExporter
from tandem.engine.factory import build_rank
from tandem.engine.peaks import device_peaks
from tandem.engine.step_work import WorkShape
from tandem.errors import ConfigError, InsufficientMemory, PortInUse, TandemError
from tandem.kvcache.layout import KvPoolLayout
from tandem.rpc.directory import WIRE_ROLE
from tandem.rpc.identity import Identity
from tandem.telemetry.logs import setup_logging
from tandem.v1 import cluster_pb2
from tandem.vllm_engine.launch import build_vllm_rank
from worker.agents import Agents
from worker.exit_codes import WRONG_CONFIG_EXIT_CODE
from worker.gpu_loss import gpu_loss_ends_process
from worker.inbox import AgentConnected, AgentLost, AgentMessage, AgentStuck, Inbox, Stop
from worker.io_thread import IoThread, ServiceLink
from worker.leader import Leader, agent_endpoint, make_requests
from worker.messages import LeaderReady, Leaving
from worker.meters import StepMeters
from worker.requests import RequestBook
from worker.roles import RoleSet, WorkerIdentity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What `make_roles` builds the roles from."""

    launch: WorkerLaunch
    identity: WorkerIdentity
    engine: Engine
    agents: Agents
    requests: RequestBook


class PoolMemory(Protocol):
    """A rank's KV pool. `fd`: memory that the transfer agent maps; None: `tensor` is on a GPU."""

    @property
    def fd(self) -> int | None: ...

    @property
    def tensor(self) -> Tensor: ...


class EngineRank(Protocol):
    """One rank of any engine, which uses one pool of the layout that the transfer agent knows."""

    @property
    def layout(self) -> KvPoolLayout: ...

    @property
    def pool(self) -> PoolMemory: ...

    @property
    def kv_heads(self) -> int:
        """The model's: those of all ranks."""
        ...

    @property
    def max_model_tokens(self) -> int: ...

    @property
    def work_shape(self) -> WorkShape: ...

    @property
    def engine(self) -> Engine:
        """Raises ConfigError on other ranks than 0."""
        ...

    def follow(self) -> None:
        """Runs the steps of rank 0 until it stops. Raises WorkerLost without it."""
        ...

    def close(self) -> None:
        """The last call. Rank 0 tells the others to stop."""
        ...


MakeRoles = Callable[[RoleParts], RoleSet]
BuildRank = Callable[[WorkerLaunch, int, KvExporter], EngineRank]  # of the rank with this index


def build_launched_rank(launch: WorkerLaunch, index: int, exporter: KvExporter) -> EngineRank:
    """A rank of the engine that `launch` names. Raises CheckpointError, ConfigError, InsufficientMemory."""
    if launch.engine.kind == "vllm":
        return build_vllm_rank(launch, index, exporter)
    return build_rank(
        Path(launch.model_dir),
        launch.engine,
        rank=index,
        size=launch.tp,
        rendezvous_file=launch.rendezvous_file,
        exporter=exporter,
    )


def shared_ticket_key(run_dir: Path) -> bytes:
    """The epoch's ticket key: the first rank creates it in the private run folder, the others read it there."""
    path = run_dir / "ticket.key"
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        while len(key := path.read_bytes()) < 32:
            time.sleep(0.01)  # the other rank has created the file but not yet written the key
        return key
    with os.fdopen(handle, "wb") as file:
        key = secrets.token_bytes(32)
        file.write(key)
    return key


def make_identity(launch: WorkerLaunch, rank: EngineRank) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=launch.worker_id,
        epoch=launch.epoch,
        tp=launch.tp,
        model_fingerprint=fingerprint(Path(launch.model_dir)),
        block_tokens=rank.layout.block_tokens,
        ticket_key=shared_ticket_key(Path(launch.run_dir)),
    )


def attach_message(launch: WorkerLaunch, identity: WorkerIdentity, rank: EngineRank, index: int) -> AttachPool:
    layout = rank.layout
    return AttachPool(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        rank=index,
        tp=identity.tp,
        model_kv_heads=rank.kv_heads,
        model_fingerprint=fingerprint_of_kv(launch, identity),
        layout=WireLayout(
            num_blocks=layout.num_blocks,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            block_tokens=layout.block_tokens,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            joined=layout.joined,
            packed=layout.packed,
        ),
        ticket_key=identity.ticket_key,
        digests=launch.transfer.digests,
        int8=launch.transfer.wire_dtype is WireDtype.INT8 and layout.element_bytes > 1,  # 8-bit pools stay as they are
        transport=launch.transfer.transport.value,
        bind_host=launch.bind_host,
        link_socket=str(launch.link_socket(index)),
        ticket_ttl_s=launch.transfer.ticket_ttl_s,
        tls=_kv_tls(launch),
        memory=export_tensor(rank.pool.tensor) if rank.pool.fd is None else None,
    )


def fingerprint_of_kv(launch: WorkerLaunch, identity: WorkerIdentity) -> str:
    """Of the model, the drafter that has a layer of the KV, and the settings that change what an image becomes."""
    parts = [identity.model_fingerprint]
    if launch.engine.drafter_layers:
        parts.append(fingerprint(Path(launch.engine.speculation_model or "")))
    if settings := launch.engine.image_settings:
        parts.append(json.dumps(settings, sort_keys=True))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32] if len(parts) > 1 else parts[0]


def _kv_tls(launch: WorkerLaunch) -> TlsFiles | None:
    """Certificates of security.tls carry the peer's identity, which is checked; those of transfer.tls need not."""
    if (given := launch.transfer.tls) is not None:
        files, peer = given, None
    elif launch.tls is not None:
        files, peer = launch.tls, Identity.WORKER.uri(launch.cluster)
    else:
        return None
    files = files.of(Identity.WORKER)
    return TlsFiles(files.cert, files.key, files.ca, peer)


def worker_info(
    launch: WorkerLaunch, identity: WorkerIdentity, rank: EngineRank, attached: dict[int, Attached]
) -> cluster_pb2.WorkerInfo:
    info = cluster_pb2.WorkerInfo(
        worker_id=launch.worker_id,
        epoch=launch.epoch,
        model=launch.model.served_name,
        role=WIRE_ROLE[launch.role],
        layout=cluster_pb2.KvLayout(
            model_fingerprint=identity.model_fingerprint,
            dtype=rank.layout.dtype,
            layers=rank.layout.layers,
            kv_heads=rank.kv_heads,
            head_dim=rank.layout.head_dim,
            joined=rank.layout.joined,
            packed=rank.layout.packed,
            block_tokens=rank.layout.block_tokens,
            tp=launch.tp,
            protocol=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL_VERSION,
        ),
        total_blocks=rank.layout.num_blocks,
        max_model_tokens=rank.max_model_tokens,
        bounds_steps=launch.engine.longest_step_s is not None,
        can=cluster_pb2.Capabilities(names=sorted(rank.engine.can)),
    )
    for index, agent in sorted(attached.items()):
        info.agents.append(agent_endpoint(index, agent))
    info.processes.add(name="rank-0", pid=os.getpid())
    return info


class LeaderConnections:
    """Connects the leader to every rank's agent and puts their messages into the inbox."""

    def __init__(self, launch: WorkerLaunch, inbox: Inbox, io: IoThread) -> None:
        self._launch = launch
        self._inbox = inbox
        self.clients = [AgentClient(io.loop) for _ in range(launch.tp)]

    def connect(self) -> None:
        for rank, client in enumerate(self.clients):
            client.connect(
                self._launch.agent_socket(rank),
                first=Lead(),
                fd=None,
                on_message=partial(self._on_message, rank),
                on_lost=partial(self._inbox.put, AgentLost(rank)),
                on_connected=partial(self._inbox.put, AgentConnected(rank)),
                on_stuck=partial(self._on_stuck, rank),
            )

    def _on_message(self, rank: int, message: FromAgent) -> None:
        self._inbox.put(AgentMessage(rank, message))

    def _on_stuck(self, rank: int, pid: int) -> None:
        self._inbox.put(AgentStuck(rank, pid))

    def wait_attached(self) -> dict[int, Attached]:
        """Blocks until every rank's pool is attached: each agent sends `Attached` to its leader too."""
        attached: dict[int, Attached] = {}
        while len(attached) < len(self.clients):
            for event in self._inbox.wait(1.0):
                match event:
                    case AgentMessage(rank=rank, message=Attached() as message):
                        attached[rank] = message
                    case AgentLost() | AgentStuck() | AgentConnected() | AgentMessage():
                        pass
                    case Stop(reason=reason):
                        raise SystemExit(reason)
                    case other:
                        self._inbox.put(other)
        return attached


def attach_pool(
    launch: WorkerLaunch, identity: WorkerIdentity, rank: EngineRank, index: int, client: AgentClient
) -> None:
    def ignore(message: FromAgent) -> None:
        """The agent reports over the leader's connection."""

    client.connect(
        launch.agent_socket(index),
        first=attach_message(launch, identity, rank, index),
        fd=rank.pool.fd,
        on_message=ignore,
        on_lost=lambda: None,
    )


def make_meters(launch: WorkerLaunch, rank: EngineRank) -> StepMeters:
    spec = launch.engine
    peaks = device_peaks(spec)  # of one rank: all ranks have the same device
    return StepMeters(
        rank.work_shape,
        peak_flops_per_s=peaks.flops_per_s * launch.tp,
        peak_memory_bytes_per_s=peaks.memory_bytes_per_s * launch.tp,
        proposer=rank.engine.proposer,
    )


def lead(launch: WorkerLaunch, make_roles: MakeRoles, rank: EngineRank, identity: WorkerIdentity, io: IoThread) -> str:
    engine = rank.engine
    inbox = Inbox()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: inbox.put(Stop(f"signal {signum}")))
    connections = LeaderConnections(launch, inbox, io)
    connections.connect()
    attached = connections.wait_attached()
    service = ServiceLink(io, inbox)
    requests = make_requests(service)
    agents = Agents(list(connections.clients), SystemClock())
    roles = make_roles(RoleParts(launch, identity, engine, agents, requests))
    info = worker_info(launch, identity, rank, attached)
    service.listen(launch.leader_socket, LeaderReady(info.SerializeToString()))
    log.info("ready: %d KV blocks, at most %d tokens per request", rank.layout.num_blocks, rank.max_model_tokens)
    try:
        with gpu_loss_ends_process(launch.engine.device):  # before `close`, which waits for the other ranks
            meters = make_meters(launch, rank)
            reason = Leader(identity, info, engine, agents, requests, roles, inbox, service, meters).run()
            service.send(Leaving())
            service.flush()
            return reason
    finally:
        rank.close()


def run(launch: WorkerLaunch, index: int, make_roles: MakeRoles, build: BuildRank) -> None:
    if launch.engine.on_gpu:
        torch.cuda.set_device(launch.engine.device)  # the process sees all GPUs; kernels start on the current one
    check_available(launch.transfer.transport, on_gpu=launch.engine.on_gpu)  # on a Ray node, first seen here
    if index:
        launch.rank_pid_file(index).write_text(str(os.getpid()))  # the leader is ready later
    io = IoThread(name="rank-io")
    client = AgentClient(io.loop)
    rank = build(launch, index, RankExporter(client))
    identity = make_identity(launch, rank)
    attach_pool(launch, identity, rank, index, client)
    if index == 0:
        log.info("stopping: %s", lead(launch, make_roles, rank, identity, io))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its leader; to end before it is to die
        rank.follow()
        rank.close()


def _lasts(error: TandemError) -> bool:
    """Whether a start with this configuration ends so each time. Not if memory, a port, a file or a peer was the cause:
    those may pass."""
    if not isinstance(error, ConfigError) or isinstance(error, InsufficientMemory | PortInUse):
        return False
    return error.__cause__ is None or isinstance(error.__cause__, ValueError | TypeError)


def main(make_roles: MakeRoles, description: str, build: BuildRank = build_launched_rank) -> None:
    """The entry point of a rank's process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--launch", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", help="of this rank: cpu or cuda:N; default: the launch's")
    arguments = parser.parse_args()
    launch = WorkerLaunch.load(arguments.launch).on_device(arguments.device)
    setup_logging(launch.log_level, process=f"{launch.worker_id}/rank-{arguments.rank}", log_format=launch.log_format)
    try:
        with gpu_loss_ends_process(launch.engine.device):
            run(launch, arguments.rank, make_roles, build)
    except TandemError as error:
        log.error("error: %s", error)
        raise SystemExit(WRONG_CONFIG_EXIT_CODE if _lasts(error) else 2) from None
