"""Composition root of one router: builds, starts and closes its parts."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from zlib import crc32

from prometheus_client import CollectorRegistry

from router.admission.parse_threads import PARSER_THREADS
from router.auth.call_gate import CallGate
from router.auth.web_pages import WebPages
from router.dashboard.feed import Feed
from router.dashboard.routes import DashboardEdge
from router.dashboard.shared_snapshots import SnapshotSource
from router.dashboard.view import RouterView
from router.edge.controller_api import TracesEdge
from router.edge.grpc_server import GrpcServer
from router.edge.http import HttpEdge
from router.edge.http_server import HttpServer, bind
from router.edge.limits.bodies import LARGEST_BODIES, BodyBudget
from router.edge.limits.http import connections_for
from router.edge.tls import EdgeTls
from router.edge.write_pauses import WritePauses
from router.idempotency.keyed_answers import KeyedAnswers
from router.idempotency.keyed_metrics import KeyedMetrics
from router.idempotency.shared_answers import SharedAnswers
from router.observe.export import TraceExport
from router.observe.metrics.certificates import CertificateCollector
from router.observe.metrics.health import HealthMetrics
from router.observe.metrics.model_server import ModelServerCollector
from router.observe.metrics.process import ResourceCollector
from router.observe.metrics.requests import RouterMetrics
from router.observe.metrics.scraped import ScrapedMetrics
from router.observers import Observers
from router.policies.pace_estimates import Estimates
from router.policies.placement import named_policy
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.probes.health_watch import HealthWatch
from router.probes.readiness import Readiness
from router.request_terms import TermsParser
from router.requests.dispatcher import Dispatcher
from router.requests.facts import Facts
from router.requests.image_expansion import ImageExpander
from router.requests.recording.files import RecordingFiles
from router.requests.serving_model import ServingModel
from router.served_models import ServedModels
from router.service import RouterService
from router.workers.directory import DirectoryFollower
from router.workers.fleet import Fleet
from tandem.clock import Clock, SystemClock
from tandem.config.auth import STDOUT, is_loopback
from tandem.config.launch import RouterLaunch
from tandem.config.model import Role
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.telemetry.resource_watch import ResourceWatch, log_folders
from tandem.telemetry.trace_context import TraceSampler
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)


class RouterApp:
    """`start` serves HTTP and gRPC. `close` refuses new requests and gives running ones `drain_timeout_s` to end."""

    def __init__(self, launch: RouterLaunch, *, clock: Clock | None = None) -> None:
        """Loads tokenizers and keys, and binds ports. Raises ConfigError (CheckpointError, PortInUse). Needs a running
        event loop."""
        clock = clock or SystemClock()
        spec = launch.router
        self._launch = launch
        self._clock = clock
        self._tls = ClusterTls.maybe(launch.cluster, Identity.ROUTER, launch.tls)
        self._executor = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parser")
        self._export = TraceExport.of(launch.observability.tracing, launch.cluster, launch.router_id)
        self._registry = CollectorRegistry()
        self.metrics = RouterMetrics(
            self._registry,
            frozenset(model.name for model in launch.models),
            is_enabled=launch.observability.metrics.enabled,
        )
        self.feed = Feed(clock)
        self.mirror = PrefixMirror(spec.index_memory_bytes)
        self._follower = (
            PrefixFollower(launch.redis_url, launch.cluster, self.mirror, clock) if launch.redis_url else None
        )
        self.metrics.watch_index(self.mirror, self._follower)
        self._files = None if spec.record is None else RecordingFiles(Path(spec.record), launch.router_id)
        self.dispatcher = self._new_dispatcher(clock)
        core = self.dispatcher.core
        self.metrics.watch_core(core)
        self.metrics.watch_classes(spec.classes)
        if launch.observability.metrics.model_server_protocol:
            self._registry.register(ModelServerCollector(core, self.dispatcher.fleet, self.metrics))
        self.observers = Observers(
            core.facts, core, self.dispatcher.fleet, self.metrics, self.feed, spec.classes, self._export
        )
        self._watch_fleet()
        self.service = self._new_service()
        self._snapshots = self._new_snapshots()
        self._directory = DirectoryFollower(launch.controller_address, launch.router_id, self._on_directory, self._tls)
        self._scraped.watch_directory(self._directory)
        self._bind_edges()
        self._resources = ResourceWatch(self._folders())
        self._watching_resources: asyncio.Task[None] | None = None
        self._registry.register(ResourceCollector(self._resources))
        self._ready = False
        self._background: set[asyncio.Task[None]] = set()

    def _new_dispatcher(self, clock: Clock) -> Dispatcher:
        launch, spec = self._launch, self._launch.router
        seed = crc32(launch.router_id.encode())
        recorder = None
        if self._files is not None:
            recorder = self._files.recorder(spec, seed=seed, text=spec.record_text)
        dispatcher = Dispatcher(
            spec=spec,
            fleet=Fleet(launch.router_id, Estimates(clock), tls=self._tls),
            mirror=self.mirror,
            policy=named_policy(spec, seed=seed),
            facts=Facts(),
            clock=clock,
            recorder=recorder,
        )
        fleet = dispatcher.fleet
        fleet.on_change = self._on_fleet_change
        fleet.on_load = dispatcher.pump_waiting
        fleet.on_work = lambda: self._watch.wake()
        return dispatcher

    def _watch_fleet(self) -> None:
        launch, fleet, clock = self._launch, self.dispatcher.fleet, self._clock
        self._scraped = ScrapedMetrics(self._registry, launch, fleet, self._export, clock)
        certificates = (("edge", launch.router.tls), ("internal", launch.tls))
        self._registry.register(CertificateCollector({use: tls.cert for use, tls in certificates if tls is not None}))
        health_metrics = HealthMetrics(self._registry, fleet.health)
        models = [model.name for model in launch.models]
        self._readiness = Readiness(fleet, models, health_metrics, clock, self._publish_readiness)
        self._watch = HealthWatch(fleet, health_metrics, clock, launch.router.worker_stall_s, on_change=fleet.changed)

    def _new_service(self) -> RouterService:
        launch, clock = self._launch, self._clock
        self._calls = CallGate(
            launch.auth,
            launch.router_id,
            launch.salt_secret,
            clock,
            lambda refused: self.metrics.rejected("", refused.code),
        )
        images = ImageExpander(self.dispatcher, LARGEST_BODIES * launch.router.max_body_bytes)
        models = {model.name: ServingModel.load(model) for model in launch.models}
        sample_ratio = launch.observability.tracing.sample_ratio if self._export else None
        return RouterService(
            cluster=launch.cluster,
            router_id=launch.router_id,
            models=ServedModels(models, self._readiness, images),
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            executor=self._executor,
            terms=TermsParser(launch.router.classes, clock, TraceSampler(sample_ratio)),
            calls=self._calls,
            images=images,
        )

    def _new_snapshots(self) -> SnapshotSource:
        launch = self._launch
        view = RouterView(
            service=self.service,
            dispatcher=self.dispatcher,
            mirror=self.mirror,
            follower=self._follower,
            traces=self.observers.traces,
            feed=self.feed,
            classes=launch.router.classes,
            clock=self._clock,
        )
        connect = partial(open_channel, launch.controller_address, self._tls, Identity.CONTROLLER, CLIENT_OPTIONS)
        return SnapshotSource(view, connect, self._clock)

    def _bind_edges(self) -> None:
        """Raises PortInUse."""
        launch, spec = self._launch, self._launch.router
        connections = connections_for(spec.max_connections)
        self.bodies = BodyBudget(LARGEST_BODIES * spec.max_body_bytes)
        self._keyed = KeyedAnswers(spec.idempotency, self._shared_answers(), KeyedMetrics(self._registry).count)
        tls = EdgeTls(spec.tls) if spec.tls is not None else None
        dashboard = DashboardEdge(self._snapshots).routes() if spec.dashboard else []
        sock = bind(spec.http_host, spec.http_port)
        self.http_port: int = sock.getsockname()[1]
        pauses = WritePauses()  # of both servers, which share the event loop
        is_open = is_loopback(spec.http_host) and not launch.auth.required
        self._http = HttpServer(
            HttpEdge(
                self.service,
                max_body_bytes=spec.max_body_bytes,
                bodies=self.bodies,
                keyed=self._keyed,
                more_routes=dashboard,
                cors_origins=spec.cors_origins,
                pauses=pauses,
                pages=WebPages(spec.cors_origins) if is_open else None,
            ).app(),
            sock,
            max_connections=connections,
            client_timeout_s=spec.client_timeout_s,
            keep_alive_s=spec.keep_alive_s,
            tls=tls,
        )
        observers, dispatcher = self.observers, self.dispatcher
        self._grpc = GrpcServer(
            self.service,
            TracesEdge(
                observers.traces.store,
                observers.tap,
                self._snapshots.router_json,
                lambda: observers.demand.report(dispatcher.waiting(), dispatcher.fleet),
                launch.controller_secret,
            ),
            self._keyed,
            observers.statistics.of,
            host=spec.grpc_host,
            port=spec.grpc_port,
            max_message_bytes=spec.max_body_bytes,
            bodies=self.bodies,
            max_connections=connections,
            client_timeout_s=spec.client_timeout_s,
            pauses=pauses,
            tls=tls,
            controller_socket=launch.controller_socket,
            control_address=launch.control_address,
            cluster_tls=self._tls,
        )
        self.grpc_port, self.control_port = self._grpc.port, self._grpc.control_port

    def _shared_answers(self) -> SharedAnswers | None:
        launch, keys = self._launch, self._launch.router.idempotency
        if not keys.share or launch.redis_url is None or launch.salt_secret is None:
            return None
        return SharedAnswers(
            launch.redis_url, launch.cluster, launch.router_id, launch.salt_secret, keys.keep_s, self._clock
        )

    def _folders(self) -> dict[str, Path]:
        """Those that this router writes to, by the setting that moves each."""
        record, audit_log = self._launch.router.record, self._launch.auth.audit_log
        return (
            log_folders()
            | ({} if record is None else {"router.record": Path(record)})
            | ({} if audit_log in (None, STDOUT) else {"security.auth.audit_log": Path(audit_log).parent})
        )

    async def start(self) -> None:
        self._watching_resources = asyncio.create_task(self._resources.run(), name="resource watch")
        self._calls.start()
        await self._grpc.start()
        await self._http.start()
        spec = self._launch.router
        log.info(
            "router listening",
            extra={"http": f"{spec.http_host}:{self.http_port}", "grpc": f"{spec.grpc_host}:{self.grpc_port}"},
        )
        if self._follower is not None:
            self._follower.start()
        self._scraped.start()
        if self._export is not None:
            self._export.start()
        self._directory.start()

    def leave(self) -> None:
        """It is not ready from now on, so that balancers send clients elsewhere, and goes on serving."""
        self.service.is_leaving = True
        self._publish_readiness()

    async def close(self) -> None:
        if self._watching_resources is not None:
            self._watching_resources.cancel()
        await self._grpc.set_ready(False)
        await self._directory.close()
        await self.dispatcher.drain(self._launch.router.drain_timeout_s)
        self._watch.close()
        self._scraped.close()
        self._readiness.close()
        await self.dispatcher.close()
        await self._keyed.close()
        await asyncio.gather(self._http.close(), self._grpc.close())
        await self._snapshots.close()
        if self._follower is not None:
            await self._follower.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)
        if self._files is not None:
            await asyncio.to_thread(self._files.close)
        await self._calls.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        log.info("router stopped")

    def _on_directory(self, directory: cluster_pb2.Directory) -> None:
        fleet = self.dispatcher.fleet
        self._scraped.set_directory(directory)
        self.service.models.set_adapters(directory.adapters)
        fleet.set_adapters(directory.adapters)
        fleet.set_directory(directory.workers)
        if self._follower is not None:
            self._follower.set_workers(fleet.keys())

    def _on_fleet_change(self) -> None:
        fleet = self.dispatcher.fleet
        prefill, decode = fleet.count_ready(Role.PREFILL), fleet.count_ready(Role.DECODE)
        self.metrics.set_workers(prefill=prefill, decode=decode)
        self.feed.fleet_watch.update(fleet)
        self._readiness.update()
        self._publish_readiness()
        self.dispatcher.pump()

    def _publish_readiness(self) -> None:
        fleet = self.dispatcher.fleet
        prefill, decode = fleet.count_ready(Role.PREFILL), fleet.count_ready(Role.DECODE)
        if self.service.ready != self._ready:
            self._ready = not self._ready
            self.feed.readiness(self.service.router_id, is_ready=self._ready)
            log.info(
                "router ready" if self._ready else "router not ready",
                extra={"prefill_workers": prefill, "decode_workers": decode},
            )
            task = asyncio.create_task(self._grpc.set_ready(self._ready))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
