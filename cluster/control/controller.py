"""The controller starts the cluster that the spec describes and keeps it running. It serves no request: if it dies,
the data path continues, and the next controller takes over what runs.

This is the composition root: it builds every part, and no part imports it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio
from pydantic import ValidationError

from cluster.backends.protocol import Backend
from cluster.control.admin_service import ALLOWED, AdminService
from cluster.control.apply import SpecApplier
from cluster.control.model_adapters import ModelAdapters
from cluster.control.record import ClusterRecord, RecordWriter, Successor
from cluster.control.redis import Redis
from cluster.control.rolling_restart import RollingRestart
from cluster.control.routers import Routers
from cluster.control.scaling.autoscaling import Autoscaling
from cluster.control.scaling.node_drainer import NodeDrainer
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.status_report import StatusReport
from cluster.control.worker_slot import EpochSettings
from cluster.control.workers import Workers
from cluster.keeper.keeper import KeeperCalls
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster, check_ports
from cluster.tasks import keep_running, raise_failure, run_together
from tandem.config.model import Role
from tandem.config.observability import LogTarget
from tandem.config.spec import ClusterSpec
from tandem.errors import PortInUse, UnavailableError
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, add_port, make_server
from tandem.rpc.identity import Identity
from tandem.telemetry.audit import AuditLog
from tandem.telemetry.logs import LEVELS
from tandem.telemetry.resource_watch import ResourceWatch
from tandem.version import tandem_version

log = logging.getLogger(__name__)

POLL_S = 0.2
PORTS_S = 5.0


class Controller:
    """`run_base` holds every private run folder of the cluster; `close` removes it. `log_dir` stays."""

    def __init__(
        self,
        cluster: ResolvedCluster,
        backend: Backend,
        keeper: KeeperCalls,
        run_base: Path,
        log_dir: Path,
        source: SpecSource | None = None,
        holder: str = "",
    ) -> None:
        self.spec = cluster.spec
        self.log_dir = log_dir
        self.stop_requested = asyncio.Event()
        self.admin_address = ""  # empty until `start`
        self.opened = asyncio.Event()  # it is the cluster's only controller, until it hears otherwise
        self.is_new = False  # whether it started the cluster, and took nothing over
        self._backend = backend
        self._run_base = run_base
        self._tls = ClusterTls.maybe(self.spec.name, Identity.CONTROLLER, self.spec.security.tls)
        self._admin: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

        fingerprints = tuple(model.fingerprint for model in cluster.models)
        self._successor = Successor(holder, tandem_version(), fingerprints, source or SpecSource(self.spec, {}))
        self._record = RecordWriter(self._build_record, backend.keep)
        touch = self._record.touch
        self.workers = Workers(cluster, backend, self._tls, touch)
        self.routers = Routers(cluster, backend, self._tls, run_base, touch, self._record.write)
        self.scaler = PoolScaler(self.workers, self.spec.control, self._record.write)
        self.restart = RollingRestart(self.workers, self.routers, self.scaler, self._record.write)
        self.adapters = ModelAdapters(self.workers, self.spec.control.start_timeout_s)
        self.autoscaling = Autoscaling(self.workers, self.scaler, self.routers, self.spec)
        self.applier = SpecApplier(
            self.scaler,
            self.autoscaling,
            self.routers,
            self.adapters,
            self._successor.source,
            touch,
            self._set_log_levels,
        )
        self._redis = Redis(self.spec.redis, run_base / "redis", keeper)
        self._node_drainer = NodeDrainer(self.workers, self.scaler, backend)
        status = StatusReport(
            self.spec,
            backend.name,
            log_dir,
            workers=self.workers,
            routers=self.routers,
            redis=self._redis,
            scaler=self.scaler,
            autoscaling=self.autoscaling,
        )
        self._admin_service = AdminService(
            workers=self.workers,
            routers=self.routers,
            scaler=self.scaler,
            restart=self.restart,
            applier=self.applier,
            status=status,
            stop_requested=self.stop_requested,
        )

    @property
    def _asked_address(self) -> str:
        return f"{self.spec.control.admin_host}:{self.spec.control.admin_port}"

    @property
    def _found_at(self) -> str:
        """Where workers and routers find a controller."""
        return self.spec.control.advertised_address or self.admin_address

    @property
    def http_address(self) -> str:
        """Of the first router; empty: there is none."""
        return next((http for http, _ in self.routers.addresses), "")

    @property
    def grpc_address(self) -> str:
        return next((grpc for _, grpc in self.routers.addresses), "")

    async def start(self) -> None:
        """Starts everything, or takes over what an earlier controller started; `wait_ready` waits until it serves.

        Raises TandemError if a part cannot be started.
        """
        self._run_base.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._backend.open()
        self.opened.set()
        record = self._read_record(await self._backend.kept())
        auth = self.spec.security.auth
        self._admin_service.audit = AuditLog.of(auth, Identity.CONTROLLER, must_open=record is None)
        await self._redis.start()
        if record is not None:
            await self._resume(record)
        else:
            self.is_new = True
            await self.adapters.start(self.spec)
            await self._backend.release_others((), ())
            await self._until_ports_are_free()
            await self._serve_admin(self._asked_address)
            async with self.scaler.waiting():
                await run_together(
                    self.routers.start(),
                    self.workers.start(self._epoch_settings(self._found_at)),
                )
        self._record.start()
        self._tasks.append(asyncio.create_task(keep_running("node drainer", self._node_drainer.run)))
        watch = ResourceWatch({"XDG_STATE_HOME": self.log_dir.parent, "XDG_RUNTIME_DIR": self._run_base})
        self._tasks.append(asyncio.create_task(keep_running("resource watch", watch.run)))
        await self.autoscaling.configure(self.applier.source.spec)

    async def _until_ports_are_free(self) -> None:
        """Routers that were stopped a moment ago may still have theirs, and drain. Raises PortInUse if others have
        them."""
        drain_s = self.spec.router.drain_timeout_s if self.spec.control.ray_address is not None else 0.0
        deadline_s = asyncio.get_running_loop().time() + drain_s + PORTS_S
        while True:
            try:
                check_ports(self.spec)
                return
            except PortInUse:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
            await asyncio.sleep(POLL_S)

    def _read_record(self, kept: str) -> ClusterRecord | None:
        """None: there is nothing to take over, or it cannot be, and is stopped."""
        if not kept:
            return None
        try:
            record = ClusterRecord.model_validate_json(kept)
            refusal = self._successor.refusal(record)
        except ValidationError:
            refusal = "its record is of another version"
        if refusal:
            log.warning("stopping the running cluster %s to start it again: %s", self.spec.name, refusal)
            return None
        return self._successor.adapted(record)

    async def _resume(self, record: ClusterRecord) -> None:
        """The directory is whole before anyone can read it: else routers would drop the workers that it lacks."""
        self.applier.source = SpecSource(record.spec, record.flags)
        self._set_log_levels(record.spec)
        self.adapters.resume(record.adapters)
        self.scaler.under_way[:] = record.under_way
        self.restart.record = record.restart
        groups = [worker.worker_id for worker in record.workers]
        await self._backend.release_others(groups, [router.launch.router_id for router in record.routers])
        # `admin_port: 0` is another port for each `tandem up`.
        control = self.spec.control
        address = record.admin_address if control.advertised_address is None else self._asked_address
        self.workers.resume(self._epoch_settings(control.advertised_address or address), record.workers)
        self.routers.secrets = record.router_secrets() or self.routers.secrets
        before = record.routers_before or record.spec
        self.routers.take_settings(before, record.joined_routers)
        await self._serve_admin(address)
        await self.routers.resume(record.routers)
        self._tasks.append(asyncio.create_task(keep_running("changes under way", self.scaler.resume)))
        settle = partial(self.applier.resume, before)
        self._tasks.append(asyncio.create_task(keep_running("routers' settings", settle)))
        if record.holder != self._successor.holder:  # another `tandem up`, maybe with another spec
            change = partial(self.applier.resume_adapters, record.spec)
            self._tasks.append(asyncio.create_task(keep_running("adapters", change)))
        self.restart.resume()

    def _epoch_settings(self, admin_address: str) -> EpochSettings:
        level = self.applier.source.spec.log_level_of("worker")
        return EpochSettings(self.spec, admin_address, self._redis.url, self._run_base, level)

    def _set_log_levels(self, spec: ClusterSpec) -> None:
        logging.getLogger().setLevel(LEVELS[spec.log_level_of("controller")])
        self.workers.set_log_level(spec.log_level_of("worker"))

    def _build_record(self) -> ClusterRecord:
        source, this = self.applier.source, self._successor
        return ClusterRecord(
            holder=this.holder,
            version=this.version,
            fingerprints=this.fingerprints,
            spec=source.spec,
            flags=dict(source.flags),
            admin_address=self.admin_address,
            workers=self.workers.records(),
            routers=self.routers.records(),
            under_way=tuple(self.scaler.under_way),
            restart=self.restart.record,
            secrets=self.routers.secrets,
            routers_before=self.routers.before(source.spec),
            joined_routers=self.routers.joined.names,
            adapters=self.adapters.records(),
        )

    async def wait_ready(self, progress: Callable[[str], None], poll_s: float = POLL_S) -> None:
        """Waits until every worker is registered, every link is up and every router serves, or a stop is requested.

        Raises:
            TandemError: a part can never become ready, or `control.start_timeout_s` has passed.
        """
        timeout_s = self.spec.control.start_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        reported = ""
        while (pending := await self._pending()) and not self.stop_requested.is_set():
            if pending != reported:
                progress(f"waiting for {pending}")
                reported = pending
            if asyncio.get_running_loop().time() > deadline_s:
                to_stdout = self.spec.observability.logs.target is LogTarget.STDOUT
                where = "on standard output" if to_stdout else f"in {self.log_dir}"
                raise UnavailableError(
                    f"control.start_timeout_s: not ready within {timeout_s:g} s, still waiting for {pending}; the logs "
                    f"are {where}"
                )
            await asyncio.sleep(poll_s)

    async def close(self) -> None:
        """Stops everything that was started, from any state."""
        await self._record.close()
        await self.routers.close()  # first: running requests need the workers
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.autoscaling.stop()
        await self.restart.close()
        await self.workers.close()
        await self._redis.stop()
        if self._admin is not None:
            await self._admin.stop(grace=0.2)
        if self._admin_service.audit is not None:
            await asyncio.to_thread(self._admin_service.audit.close)
        await self._backend.close()
        shutil.rmtree(self._run_base, ignore_errors=True)

    async def _pending(self) -> str:
        """Names what is not ready yet; empty if everything is."""
        raise_failure(self._tasks)
        return await self.workers.pending() or await self.adapters.pending() or await self.routers.pending()

    async def _serve_admin(self, address: str) -> None:
        self._admin = make_server(self._tls, ALLOWED, SERVER_OPTIONS, self._admin_service.refused)
        self._admin_service.add_to(self._admin)
        try:
            port = add_port(self._admin, address, self._tls)
        except RuntimeError:  # gRPC gives no reason; the port was free a moment ago
            raise PortInUse(
                f"control.admin_port: cannot listen on {address}: choose another with --admin-port",
                field="control.admin_port",
            ) from None
        self.admin_address = f"{address.rpartition(':')[0]}:{port}"
        self.routers.configure(self._found_at, self._redis.url)
        await self._admin.start()


def needed_cpus(cluster: ResolvedCluster) -> float:
    """CPUs that a local Ray cluster offers: those that the spec's workers use. Ray starts a process for each CPU, so
    more would cost; workers added later fit because each rank reserves a fraction only (`Workers.add`)."""
    return sum(
        model.spec.pool(role).workers * model.spec.pool(role).tp * model.spec.engine_of(role).threads_per_rank
        for model in cluster.models
        for role in Role
    )
