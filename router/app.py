"""Puts one router together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from zlib import crc32

from prometheus_client import CollectorRegistry

from router.directory import DirectoryFollower
from router.dispatch import Dispatcher
from router.edge_grpc import GrpcServer
from router.edge_http import HttpEdge, HttpServer, bind
from router.edge_traces import TracesEdge
from router.fleet import Fleet
from router.health_metrics import HealthMetrics
from router.health_watch import HealthWatch
from router.http_limits import connections_for
from router.metrics import RouterMetrics
from router.policies.estimates import Estimates
from router.policies.profiles import policy_profile
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.readiness import Readiness
from router.request import ServingModel
from router.service import RouterService
from router.terms import TermsParser
from tandem.clock import Clock, SystemClock
from tandem.config import Role
from tandem.launch import RouterLaunch
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)

PARSER_THREADS = 2


class RouterApp:
    """`start` binds both edges; `close` refuses new requests and lets running ones end for router.drain_timeout_s."""

    def __init__(self, launch: RouterLaunch, *, clock: Clock | None = None) -> None:
        """Loads tokenizers and binds ports. Raises CheckpointError, PortInUse. Needs a running event loop."""
        clock = clock or SystemClock()
        spec = launch.router
        self._router_id = launch.router_id
        self._executor = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parser")
        self.mirror = PrefixMirror(spec.index_memory_bytes)
        registry = CollectorRegistry()
        self.metrics = RouterMetrics(registry, frozenset(model.name for model in launch.models))
        self.dispatcher = Dispatcher(
            spec=spec,
            fleet_of=partial(self._new_fleet, Estimates(clock)),
            mirror=self.mirror,
            policy=policy_profile(spec, seed=crc32(launch.router_id.encode())),
            metrics=self.metrics,
            clock=clock,
        )
        fleet, models = self.dispatcher.fleet, [model.name for model in launch.models]
        health_metrics = HealthMetrics(registry, fleet.health)
        self._readiness = Readiness(fleet, models, health_metrics, clock, self._tell_readiness)
        self._watch = HealthWatch(fleet, health_metrics, clock, spec.worker_stall_s, on_change=fleet.changed)
        self.service = RouterService(
            cluster=launch.cluster,
            router_id=launch.router_id,
            models={model.name: ServingModel.load(model) for model in launch.models},
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            executor=self._executor,
            readiness=self._readiness,
            terms=TermsParser(spec.classes, clock),
        )
        self._follower = (
            PrefixFollower(launch.redis_url, launch.cluster, self.mirror, clock) if launch.redis_url else None
        )
        self.dispatcher.fleet.on_load = self.dispatcher.pump_waiting
        self.metrics.watch_index(self.mirror, self._follower)
        self._directory = DirectoryFollower(launch.controller_address, launch.router_id, self._on_directory)
        sock = bind(spec.http_host, spec.http_port)
        self.http_port: int = sock.getsockname()[1]
        connections = connections_for(spec.max_connections)
        self._http = HttpServer(
            HttpEdge(self.service, max_body_bytes=spec.max_body_bytes),
            sock,
            max_connections=connections,
            client_timeout_s=spec.client_timeout_s,
            keep_alive_s=spec.keep_alive_s,
        )
        self._grpc = GrpcServer(
            self.service,
            TracesEdge(self.dispatcher.traces, launch.controller_secret),
            host=spec.grpc_host,
            port=spec.grpc_port,
            max_message_bytes=spec.max_body_bytes,
            max_connections=connections,
            client_timeout_s=spec.client_timeout_s,
        )
        self.grpc_port = self._grpc.port
        self._hosts = (spec.http_host, spec.grpc_host)
        self._drain_timeout_s = spec.drain_timeout_s
        self._ready = False
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._grpc.start()
        await self._http.start()
        http_host, grpc_host = self._hosts
        log.info(
            "router listening",
            extra={"http": f"{http_host}:{self.http_port}", "grpc": f"{grpc_host}:{self.grpc_port}"},
        )
        if self._follower is not None:
            self._follower.start()
        self._directory.start()

    async def close(self) -> None:
        await self._grpc.set_ready(False)
        await self._directory.close()
        await self.dispatcher.drain(self._drain_timeout_s)
        self._watch.close()
        self._readiness.close()
        await self.dispatcher.close()
        await asyncio.gather(self._http.close(), self._grpc.close())
        if self._follower is not None:
            await self._follower.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        log.info("router stopped")

    def _on_directory(self, workers: Sequence[cluster_pb2.WorkerInfo]) -> None:
        fleet = self.dispatcher.fleet
        fleet.set_directory(workers)
        if self._follower is not None:
            self._follower.set_workers(fleet.keys())

    def _new_fleet(self, estimates: Estimates, pump: Callable[[], None]) -> Fleet:
        return Fleet(
            self._router_id,
            estimates,
            on_change=lambda: self._on_fleet_change(pump),
            on_work=lambda: self._watch.wake(),
        )

    def _on_fleet_change(self, pump: Callable[[], None]) -> None:
        fleet = self.dispatcher.fleet
        prefill, decode = fleet.count_ready(Role.PREFILL), fleet.count_ready(Role.DECODE)
        self.metrics.set_workers(prefill=prefill, decode=decode)
        self._readiness.update()
        self._tell_readiness()
        pump()

    def _tell_readiness(self) -> None:
        fleet = self.dispatcher.fleet
        prefill, decode = fleet.count_ready(Role.PREFILL), fleet.count_ready(Role.DECODE)
        if self.service.ready != self._ready:
            self._ready = not self._ready
            log.info(
                "router ready" if self._ready else "router not ready",
                extra={"prefill_workers": prefill, "decode_workers": decode},
            )
            task = asyncio.create_task(self._grpc.set_ready(self._ready))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
