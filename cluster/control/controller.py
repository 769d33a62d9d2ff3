"""The controller starts the cluster that the spec describes and keeps it running. It serves no request: if it stops
answering, the data path continues.

This is the composition root: it builds every part, and no part imports it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from cluster.backends.protocol import Backend
from cluster.control.admin_service import ALLOWED, AdminService
from cluster.control.apply import SpecApplier
from cluster.control.autoscaling import Autoscaling
from cluster.control.node_drainer import NodeDrainer
from cluster.control.pool_scaler import PoolScaler
from cluster.control.redis import Redis
from cluster.control.routers import Routers
from cluster.control.status_report import StatusReport
from cluster.control.tasks import raise_failure, run_together
from cluster.control.worker_slot import EpochSettings
from cluster.control.workers import Workers
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster, free_ports
from tandem.config.spec import Role
from tandem.errors import PortInUse, UnavailableError
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, add_port, make_server
from tandem.rpc.identity import Identity

POLL_S = 0.2


class Controller:
    """`run_base` holds every private run folder of the cluster; `close` removes it. `log_dir` stays."""

    def __init__(
        self,
        cluster: ResolvedCluster,
        backend: Backend,
        run_base: Path,
        log_dir: Path,
        source: SpecSource | None = None,
    ) -> None:
        self.spec = cluster.spec
        self.log_dir = log_dir
        self.stop_requested = asyncio.Event()
        self.admin_address = ""  # empty until `start`
        self._backend = backend
        self._run_base = run_base
        self._tls = ClusterTls.maybe(self.spec.name, Identity.CONTROLLER, self.spec.security.tls)
        self._admin: grpc.aio.Server | None = None
        self._drainer: asyncio.Task[None] | None = None

        self.workers = Workers(cluster, backend, self._tls)
        self.routers = Routers(cluster, backend, run_base)
        self.scaler = PoolScaler(self.workers, self.spec.control)
        self.autoscaling = Autoscaling(self.workers, self.scaler, self.routers, self.spec)
        self.applier = SpecApplier(self.scaler, self.autoscaling, source or SpecSource(self.spec, {}))
        self._redis = Redis(self.spec.redis, run_base / "redis", log_dir)
        self._node_drainer = NodeDrainer(self.workers, self.scaler, backend)
        status = StatusReport(
            self.spec,
            backend.name,
            log_dir,
            workers=self.workers,
            routers=self.routers,
            redis=self._redis,
            autoscaling=self.autoscaling,
        )
        self._admin_service = AdminService(
            workers=self.workers,
            routers=self.routers,
            scaler=self.scaler,
            applier=self.applier,
            status=status,
            stop_requested=self.stop_requested,
        )

    @property
    def http_address(self) -> str:
        return self.routers.http_address

    @property
    def grpc_address(self) -> str:
        return self.routers.grpc_address

    async def start(self) -> None:
        """Starts everything; `wait_ready` waits until it serves. Raises TandemError if a part cannot be started."""
        self._run_base.mkdir(mode=0o700, parents=True)
        await self._serve_admin()
        await self._redis.start()
        settings = EpochSettings(self.spec, self.admin_address, self._redis.url, self._run_base)
        await self._backend.open()
        await run_together(
            self.routers.start(self.admin_address, self._redis.url),
            self.workers.start(settings),
        )
        self._drainer = asyncio.create_task(self._node_drainer.run())
        await self.autoscaling.configure(self.spec)

    async def wait_ready(self, progress: Callable[[str], None], poll_s: float = POLL_S) -> None:
        """Waits until every worker is registered, every link is up and every router serves.

        Raises:
            TandemError: a part can never become ready, or `control.start_timeout_s` has passed.
        """
        timeout_s = self.spec.control.start_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        reported = ""
        while pending := await self._pending():
            if pending != reported:
                progress(f"waiting for {pending}")
                reported = pending
            if asyncio.get_running_loop().time() > deadline_s:
                raise UnavailableError(
                    f"control.start_timeout_s: not ready within {timeout_s:g} s, still waiting for {pending}; the logs "
                    f"are in {self.log_dir}"
                )
            await asyncio.sleep(poll_s)

    async def close(self) -> None:
        """Stops everything that was started, from any state."""
        await self.routers.close()  # first: running requests need the workers
        if self._drainer is not None:
            self._drainer.cancel()
            await asyncio.gather(self._drainer, return_exceptions=True)
        await self.autoscaling.stop()
        await self.workers.close()
        await self._redis.stop()
        if self._admin is not None:
            await self._admin.stop(grace=0.2)
        await self._backend.close()
        shutil.rmtree(self._run_base, ignore_errors=True)

    async def _pending(self) -> str:
        """Names what is not ready yet; empty if everything is."""
        if self._drainer is not None:
            raise_failure([self._drainer])
        return await self.workers.pending() or await self.routers.pending()

    async def _serve_admin(self) -> None:
        control = self.spec.control
        self._admin = make_server(self._tls, ALLOWED, SERVER_OPTIONS)
        self._admin_service.add_to(self._admin)
        try:
            port = add_port(self._admin, f"{control.admin_host}:{control.admin_port}", self._tls)
        except RuntimeError:  # gRPC gives no reason; the port was free a moment ago
            raise PortInUse(
                f"control.admin_port: cannot listen on {control.admin_host}:{control.admin_port}: choose another with "
                "--admin-port",
                field="control.admin_port",
            ) from None
        await self._admin.start()
        self.admin_address = f"{control.admin_host}:{port}"


def needed_cpus(cluster: ResolvedCluster) -> float:
    """CPUs that a local Ray cluster offers: those that the spec's workers use. Ray starts a process for each CPU, so
    more would cost; workers added later fit because each rank reserves a fraction only (`Workers.add`)."""
    return sum(
        model.spec.pool(role).workers * model.spec.pool(role).tp * model.spec.engine_of(role).threads_per_rank
        for model in cluster.models
        for role in Role
    )


def with_free_ports(cluster: ResolvedCluster) -> ResolvedCluster:
    """Replaces router ports given as 0 by free ones, before any process is started with them."""
    spec = cluster.spec
    hosts = {"http_port": spec.router.http_host, "grpc_port": spec.router.grpc_host}
    missing = [name for name in hosts if not getattr(spec.router, name)]
    ports = free_ports(*(hosts[name] for name in missing))
    router = spec.router.model_copy(update=dict(zip(missing, ports, strict=True)))
    return ResolvedCluster(spec.model_copy(update={"router": router}), cluster.models, cluster.devices)
