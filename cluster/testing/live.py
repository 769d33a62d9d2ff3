"""Live workers for tests and benchmarks: real rank, agent and service processes; no router, no Ray.

`live_pair(...)` starts one prefill and one decode worker and opens a session with each. On exit it checks that every KV
block is accounted for.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from kvtransfer.agent.env import AGENT_ENV
from tandem.config.engine import EngineOverrides, EngineSpec
from tandem.config.launch import WorkerLaunch
from tandem.config.model import ModelSpec, PoolSpec, Role
from tandem.config.security import TlsSpec
from tandem.config.transfer import TransferSpec, TransportKind, WireDtype
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.testing.fork import ForkServer, Process
from tandem.testing.machines import HOME, Machines
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2
from worker.testing.session import WorkerSession, assert_conserved, open_session

START_TIMEOUT_S = 300.0


class FakeController(cluster_pb2_grpc.ClusterServicer):
    """The membership part of a controller, which is all that workers need. Other calls raise NotImplementedError."""

    def __init__(self) -> None:
        self.workers: dict[str, cluster_pb2.WorkerInfo] = {}
        self.version = 0
        self.changed = asyncio.Condition()

    async def Register(self, request: cluster_pb2.RegisterRequest, context: Any) -> cluster_pb2.RegisterResponse:
        await self.put(request.worker)
        return cluster_pb2.RegisterResponse()

    async def put(self, worker: cluster_pb2.WorkerInfo) -> None:
        async with self.changed:
            self.workers[worker.worker_id] = worker
            self.version += 1
            self.changed.notify_all()

    async def remove(self, worker_id: str) -> None:
        async with self.changed:
            self.workers.pop(worker_id, None)
            self.version += 1
            self.changed.notify_all()

    async def WatchDirectory(
        self, request: cluster_pb2.WatchDirectoryRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.Directory]:
        while True:
            async with self.changed:
                directory = cluster_pb2.Directory(version=self.version, workers=list(self.workers.values()))
            yield directory
            async with self.changed:
                await self.changed.wait_for(partial(self._is_after, directory.version))

    def _is_after(self, version: int) -> bool:
        return self.version != version

    def JoinRouter(
        self, request: cluster_pb2.JoinRouterRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.RouterSettings]:
        raise NotImplementedError("FakeController: expected a membership call")

    def GetModelFiles(
        self, request: cluster_pb2.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.ModelFilePart]:
        raise NotImplementedError("FakeController: expected a membership call")

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Any) -> cluster_pb2.ClusterStatus:
        raise NotImplementedError("FakeController: expected a membership call")

    def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: Any
    ) -> AsyncIterator[trace_pb2.LoggedRequest]:
        raise NotImplementedError("FakeController: expected a membership call")

    async def ListSnapshots(
        self, request: cluster_pb2.ListSnapshotsRequest, context: Any
    ) -> cluster_pb2.ListSnapshotsResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Any) -> cluster_pb2.ShutdownResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Any) -> cluster_pb2.ScaleResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Any
    ) -> cluster_pb2.DrainWorkerResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def RestartWorkers(
        self, request: cluster_pb2.RestartWorkersRequest, context: Any
    ) -> cluster_pb2.RollingRestart:
        raise NotImplementedError("FakeController: expected a membership call")

    async def GetRestart(self, request: cluster_pb2.GetRestartRequest, context: Any) -> cluster_pb2.RollingRestart:
        raise NotImplementedError("FakeController: expected a membership call")

    async def Apply(self, request: cluster_pb2.ApplyRequest, context: Any) -> cluster_pb2.ApplyResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Any) -> trace_pb2.RequestTrace:
        raise NotImplementedError("FakeController: expected a membership call")

    async def ListTraces(self, request: trace_pb2.ListTracesRequest, context: Any) -> trace_pb2.ListTracesResponse:
        raise NotImplementedError("FakeController: expected a membership call")

    async def wait_for(self, worker_id: str, epoch: int) -> cluster_pb2.WorkerInfo:
        async with self.changed:
            await self.changed.wait_for(lambda: worker_id in self.workers and self.workers[worker_id].epoch == epoch)
            return self.workers[worker_id]


class LiveWorker:
    """The processes of one epoch of one worker.

    Args:
        rank_module: the program of a rank, with `--launch` and `--rank`.
        forks: forks all of them, with the C library's settings of the server instead of AGENT_ENV's; None starts
            each as a process of its own.
        machines: starts it on the machine that has its name.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        log: Path,
        rank_module: str,
        forks: ForkServer | None = None,
        machines: Machines | None = None,
    ) -> None:
        self.launch = launch
        self.log = log
        self._machines, self._forks = machines, forks
        self._rank_module = rank_module
        run_dir = Path(launch.run_dir)
        run_dir.mkdir(mode=0o700)
        launch_file = run_dir / "launch.json"
        launch_file.write_text(launch.model_dump_json())
        self.agents = [self._start("kvtransfer.agent", "--socket", launch.agent_socket(r)) for r in range(launch.tp)]
        self.ranks = [self._start_rank(str(launch_file), str(r)) for r in range(launch.tp)]
        self.service = self._start("worker.service", "--launch", launch_file)

    def _start_rank(self, launch_file: str, rank: str) -> Process:
        arguments: tuple[str, ...] = ("--launch", launch_file, "--rank", rank)
        if self.launch.engine.device == "cuda":
            arguments += ("--device", f"cuda:{rank}")
        return self._start(self._rank_module, *arguments)

    def _start(self, module: str, *arguments: object) -> Process:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        env = os.environ | (AGENT_ENV if module == "kvtransfer.agent" else {"OMP_NUM_THREADS": "1"})
        if self._forks is not None and self._machines is None:
            return self._forks.start(module, [str(each) for each in arguments], self.log, env)

        def start() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                return subprocess.Popen(command, stdout=log, stderr=log, env=env)

        return start() if self._machines is None else self._machines.run_on(self.launch.worker_id, start)

    def restart_agent(self, rank: int) -> None:
        self.agents[rank] = self._start("kvtransfer.agent", "--socket", self.launch.agent_socket(rank))

    @property
    def is_alive(self) -> bool:
        """Whether rank 0, the leader, runs. Without it the worker is lost."""
        return self.ranks[0].poll() is None

    @property
    def can_answer(self) -> bool:
        return self.is_alive and self.service.poll() is None

    def processes(self) -> list[Process]:
        return [*self.ranks, *self.agents, self.service]

    def kill(self) -> None:
        """Kills all processes at once with SIGKILL."""
        for process in self.processes():
            process.kill()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        for process in self.processes():
            if process.poll() is None:
                process.send_signal(signum)
        for process in self.processes():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class LiveWorkers:
    """Live workers, and the fake controller in whose directory they register."""

    directory: FakeController
    controller_address: str
    folder: Path
    rank_module: str
    live: dict[str, LiveWorker]
    redis_url: str | None = None
    forks: ForkServer | None = None
    machines: Machines | None = None

    async def start(
        self,
        worker_id: str,
        role: Role,
        model: ModelSpec,
        transfer: TransferSpec,
    ) -> cluster_pb2.WorkerInfo:
        epoch = secrets.randbits(62) + 1
        launch = WorkerLaunch(
            cluster="test",
            worker_id=worker_id,
            epoch=epoch,
            role=role,
            model=model,
            engine=model.engine_of(role),
            model_dir=model.source,
            transfer=transfer,
            controller_address=self.controller_address,
            redis_url=self.redis_url,
            run_dir=str(self.folder / f"{worker_id}-{epoch:x}"),
        )
        worker = LiveWorker(launch, self.folder / f"{worker_id}.log", self.rank_module, self.forks, self.machines)
        self.live[worker_id] = worker
        waiting = asyncio.create_task(self.directory.wait_for(worker_id, epoch))
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not waiting.done():
            died = any(process.poll() is not None for process in worker.processes())
            if died or asyncio.get_running_loop().time() > deadline:
                waiting.cancel()
                raise RuntimeError(f"{worker_id} did not start:\n{worker.log.read_text()[-4000:]}")
            await asyncio.wait([waiting], timeout=0.1)
        return waiting.result()

    async def restart(self, worker_id: str) -> cluster_pb2.WorkerInfo:
        """Kills the worker and starts its next epoch, as a controller would."""
        launch = self.live[worker_id].launch
        await self.stop(worker_id, signal.SIGKILL)
        return await self.start(worker_id, launch.role, launch.model, launch.transfer)

    async def stop(self, worker_id: str, signum: int = signal.SIGTERM) -> None:
        await self.directory.remove(worker_id)
        await asyncio.to_thread(self.live.pop(worker_id).stop, signum)


@asynccontextmanager
async def workers(
    folder: Path,
    rank_module: str,
    redis_url: str | None = None,
    forks: ForkServer | None = None,
    machines: Machines | None = None,
) -> AsyncIterator[LiveWorkers]:
    directory = FakeController()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    cluster_pb2_grpc.add_ClusterServicer_to_server(directory, server)
    host = "127.0.0.1" if machines is None else machines.addresses[HOME]
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    running = LiveWorkers(directory, f"{host}:{port}", folder, rank_module, {}, redis_url, forks, machines)
    try:
        yield running
    finally:
        for worker_id in list(running.live):
            await running.stop(worker_id)
        await server.stop(grace=None)


@dataclass
class LivePair:
    """One prefill and one decode worker, and a session with each."""

    prefill: WorkerSession
    decode: WorkerSession
    workers: LiveWorkers


@asynccontextmanager
async def live_pair(
    folder: Path,
    model_dir: Path,
    *,
    rank_module: str,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    transport: TransportKind = TransportKind.AUTO,
    engine: EngineSpec | None = None,
    decode_engine: EngineOverrides | None = None,
    ticket_ttl_s: float = 30.0,
    wire_dtype: WireDtype = WireDtype.POOL,
    tls: TlsSpec | None = None,
    forks: ForkServer | None = None,
) -> AsyncIterator[LivePair]:
    """Starts a prefill and a decode worker.

    Args:
        folder: private, with a path short enough for unix sockets in it.
        rank_module: the program of a rank.
        engine: with device `cuda`, rank R gets `cuda:R`.
    """
    model = ModelSpec(
        source=str(model_dir),
        prefill=PoolSpec(tp=prefill_tp),
        decode=PoolSpec(tp=decode_tp, engine=decode_engine or EngineOverrides()),
        engine=engine or EngineSpec(kv_blocks=256),
    )
    transfer = TransferSpec(transport=transport, ticket_ttl_s=ticket_ttl_s, wire_dtype=wire_dtype, tls=tls)
    async with workers(folder, rank_module, forks=forks) as running, AsyncExitStack() as sessions:
        prefill, decode = await asyncio.gather(
            running.start("prefill-0", Role.PREFILL, model, transfer),
            running.start("decode-0", Role.DECODE, model, transfer),
        )
        pair = LivePair(
            await sessions.enter_async_context(open_session(prefill.address)),
            await sessions.enter_async_context(open_session(decode.address)),
            running,
        )
        yield pair
        await assert_conserved(*(session for session in (pair.prefill, pair.decode) if not session.lost))
