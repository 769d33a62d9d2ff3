"""Registers this epoch of a worker with the controller, then follows the directory for peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from kvtransfer.control import Peer
from tandem.config.launch import WorkerLaunch
from tandem.engine.api import AdapterFiles
from tandem.rpc.directory import DirectoryGap, apply_directory
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Registration:
    """Retries while the controller is unreachable; meanwhile the worker keeps serving.

    Args:
        info: this epoch; registered again whenever the controller comes back.
        on_peers: called after every change with the agents of the same model's other workers.
        on_adapters: likewise with the model's adapters.

    The directory decides the role, which may differ from the one the worker was started for.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        info: cluster_pb2.WorkerInfo,
        on_peers: Callable[[tuple[Peer, ...]], None],
        on_adapters: Callable[[tuple[AdapterFiles, ...]], None],
        tls: ClusterTls | None = None,
    ) -> None:
        self._launch = launch
        self._info = info
        self._on_peers = on_peers
        self._on_adapters = on_adapters
        self._tls = tls
        self._changed = asyncio.Event()

    def update_agents(self, info: cluster_pb2.WorkerInfo) -> None:
        """An agent was replaced and listens at another address: registers the worker again."""
        del self._info.agents[:]
        self._info.agents.extend(info.agents)
        self._changed.set()

    async def run(self) -> None:
        """Never returns. Raises TandemError when the controller refuses this worker permanently."""
        while True:
            try:
                address = self._launch.controller_address
                async with open_channel(address, self._tls, Identity.CONTROLLER, CLIENT_OPTIONS) as channel:
                    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
                    self._changed.clear()  # a change from here on needs another registration
                    # With TLS a retry opens a new channel: an open one keeps its certificate after a renewal.
                    wait_for_ready = self._tls is None
                    request = cluster_pb2.RegisterRequest(
                        worker=self._info,
                        protocol=CONTROL_VERSIONS.protocol,
                        oldest_protocol=CONTROL_VERSIONS.oldest_protocol,
                    )
                    answer = await stub.Register(request, wait_for_ready=wait_for_ready)
                    names = (self._launch.worker_id, "the controller")
                    common_version(CONTROL_VERSIONS, stated_versions(answer, CONTROL_BEFORE_RANGES), names)
                    await self._follow(stub)
            except grpc.aio.AioRpcError as failure:
                if failure.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                    raise error_from_rpc(failure) from failure
                log.info("the controller is unreachable (%s); trying again", failure.code().name)
            if not self._changed.is_set():
                await asyncio.sleep(RETRY_S)

    async def _follow(self, stub: cluster_pb2_grpc.ClusterAsyncStub) -> None:
        """Passes on the directory until the controller is lost or this worker must register again."""
        request = cluster_pb2.WatchDirectoryRequest(
            watcher=self._launch.worker_id,
            takes_changes=True,
            protocol=CONTROL_VERSIONS.protocol,
            oldest_protocol=CONTROL_VERSIONS.oldest_protocol,
        )
        watching = stub.WatchDirectory(request)
        known: cluster_pb2.Directory | None = None
        ending = asyncio.create_task(self._changed.wait())
        ending.add_done_callback(lambda _: watching.cancel())
        try:
            async for message in watching:
                known = apply_directory(known, message)
                self._on_peers(peers_of(known, self._info))
                self._on_adapters(adapters_of(known, self._info.model))
        except asyncio.CancelledError:
            if not self._changed.is_set():
                raise  # this worker is being stopped
        except DirectoryGap as gap:
            log.info("%s; asking for all of it", gap.message)
        finally:
            ending.cancel()


def adapters_of(directory: cluster_pb2.Directory, model: str) -> tuple[AdapterFiles, ...]:
    return tuple(AdapterFiles(each.fingerprint, each.folder) for each in directory.adapters if each.model == model)


def peers_of(directory: cluster_pb2.Directory, own: cluster_pb2.WorkerInfo) -> tuple[Peer, ...]:
    """The agents with which a worker may exchange blocks: those of its model's other workers. A prefill worker keeps
    links to all decode workers."""
    role = next((worker.role for worker in directory.workers if worker.worker_id == own.worker_id), own.role)
    return tuple(
        Peer(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            rank=agent.rank,
            tp=worker.layout.tp,
            host_id=agent.host_id,
            mapped_path=agent.mapped_path,
            tcp_address=agent.tcp_address,
            protocol=worker.layout.protocol,
            oldest_protocol=worker.layout.oldest_protocol,
            device=agent.device,
            machine_id=agent.machine_id,
            transports=tuple(agent.transports),
            connect=role == cluster_pb2.ROLE_PREFILL and worker.role == cluster_pb2.ROLE_DECODE,
        )
        for worker in directory.workers
        if worker.model == own.model and worker.worker_id != own.worker_id
        for agent in worker.agents
    )
