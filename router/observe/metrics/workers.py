"""Metrics of workers, from their reports and from the controller, read at each scrape.

Labels are the ids of the spec's workers. Every router shows the same values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtransfer.control import REACHABLE
from router.observe.metrics.instruments import cumulated
from router.workers.fleet import Fleet, Worker
from tandem.config.model import Role
from tandem.rpc.directory import ROLE_OF
from tandem.v1 import cluster_pb2, worker_pb2
from worker.meters import STEP_BOUNDS_S

WORKER = ("model", "role", "worker")
LINK = (*WORKER, "peer", "transport")


@dataclass(frozen=True, slots=True)
class SpecWorker:
    """A worker of the cluster's spec."""

    worker_id: str
    model: str
    role: Role
    ranks: int
    restarts: int

    @property
    def labels(self) -> tuple[str, str, str]:
        return (self.model, self.role.value, self.worker_id)


def parse_places(places: Sequence[cluster_pb2.WorkerPlace]) -> dict[str, SpecWorker]:
    """The spec's workers by id, without those of unknown roles."""
    known = ((each, ROLE_OF.get(each.role)) for each in places)
    return {
        each.worker_id: SpecWorker(each.worker_id, each.model, role, max(1, each.ranks), each.restarts)
        for each, role in known
        if role is not None
    }


class WorkerCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self.places: Mapping[str, SpecWorker] = {}  # of the controller's last directory
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        workers = [worker for worker in self._fleet.workers() if worker.listed]
        yield from self._members(workers)
        reporting = [worker for worker in workers if worker.link.ready]
        yield from _loads([(_labels(each), each.link.load) for each in reporting if each.link.load is not None])
        reports = [(each, each.link.meters.latest) for each in reporting]
        metered = [(_labels(each), meters) for each, meters in reports if meters is not None]
        yield from _steps(metered)
        yield from _work(metered)
        yield from _host_tiers(reporting)
        yield from _utilization(reporting)
        yield from _links(metered)

    def _members(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        up = GaugeMetricFamily("tandem_worker_up", "Whether this router has a link to the worker.", labels=WORKER)
        linked = {each.labels: 0.0 for each in self.places.values()}
        for worker in workers:
            labels = _labels(worker)
            linked[labels] = max(linked.get(labels, 0.0), float(worker.link.ready))
        for labels, value in linked.items():
            up.add_metric(labels, value)
        yield up
        restarts = CounterMetricFamily(
            "tandem_worker_restarts", "Restarts of the worker by the controller.", labels=WORKER
        )
        for place in self.places.values():
            restarts.add_metric(place.labels, place.restarts)
        yield restarts


def _labels(worker: Worker) -> tuple[str, str, str]:
    return (worker.link.info.model, worker.role.value, worker.key.worker_id)


def _loads(loads: Sequence[tuple[tuple[str, str, str], worker_pb2.WorkerLoad]]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("tandem_worker_blocks", "KV blocks by state.", labels=(*WORKER, "state"))
    requests = GaugeMetricFamily("tandem_worker_requests", "Requests by state.", labels=(*WORKER, "state"))
    waiting = GaugeMetricFamily("tandem_worker_waiting_tokens", "Prompt tokens to compute.", labels=WORKER)
    for labels, load in loads:
        counts = load.blocks
        by_state = {"free": counts.free, "cached": counts.cached, "leased": counts.leased, "in_use": counts.in_use}
        for state, count in by_state.items():
            blocks.add_metric((*labels, state), count)
        running = {
            "waiting": load.waiting_requests,
            "running": load.running_requests,
            "reserved": load.reserved_requests,
        }
        for state, count in running.items():
            requests.add_metric((*labels, state), count)
        waiting.add_metric(labels, load.waiting_tokens)
    yield from (blocks, requests, waiting)


def _steps(metered: Sequence[tuple[tuple[str, str, str], worker_pb2.WorkerMeters]]) -> Iterator[Metric]:
    steps = HistogramMetricFamily(
        "tandem_worker_step_seconds", "Duration of engine steps by kind.", labels=(*WORKER, "kind")
    )
    for labels, meters in metered:
        for step in meters.steps:
            steps.add_metric((*labels, step.kind), cumulated(STEP_BOUNDS_S, step.counts), step.total_s)
    yield steps


def _work(metered: Sequence[tuple[tuple[str, str, str], worker_pb2.WorkerMeters]]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "tandem_worker_tokens", "Tokens computed, recomputed ones included.", labels=(*WORKER, "kind")
    )
    preemptions = CounterMetricFamily(
        "tandem_worker_preemptions", "Requests that lost their KV blocks to older requests.", labels=WORKER
    )
    flops = CounterMetricFamily("tandem_worker_flops", "Floating-point operations of all steps.", labels=WORKER)
    memory = CounterMetricFamily("tandem_worker_memory_bytes", "Bytes of memory traffic of all steps.", labels=WORKER)
    peak_flops = GaugeMetricFamily("tandem_worker_peak_flops", "Peak FLOP/s of its ranks.", labels=WORKER)
    peak_memory = GaugeMetricFamily(
        "tandem_worker_peak_memory_bytes_per_second", "Peak memory bandwidth of its ranks.", labels=WORKER
    )
    proposed = CounterMetricFamily(
        "tandem_worker_proposed_tokens",
        "Tokens that were computed before they were chosen.",
        labels=(*WORKER, "proposer", "outcome"),
    )
    for labels, meters in metered:
        if meters.proposed_tokens:
            proposed.add_metric((*labels, meters.proposer, "accepted"), meters.accepted_tokens)
            proposed.add_metric((*labels, meters.proposer, "unused"), meters.proposed_tokens - meters.accepted_tokens)
        tokens.add_metric((*labels, "prefill"), meters.prefill_tokens)
        tokens.add_metric((*labels, "decode"), meters.decode_tokens)
        preemptions.add_metric(labels, meters.preemptions)
        flops.add_metric(labels, meters.flops)
        memory.add_metric(labels, meters.memory_bytes)
        peak_flops.add_metric(labels, meters.peak_flops_per_s)
        peak_memory.add_metric(labels, meters.peak_memory_bytes_per_s)
    yield from (tokens, proposed, preemptions, flops, memory, peak_flops, peak_memory)


def _host_tiers(workers: Sequence[Worker]) -> Iterator[Metric]:
    """Only workers with a host tier."""
    blocks = GaugeMetricFamily(
        "tandem_worker_host_blocks", "Slots of the host tier by state.", labels=(*WORKER, "state")
    )
    moved = CounterMetricFamily(
        "tandem_worker_host_moved_blocks", "KV blocks copied to or from the host tier.", labels=(*WORKER, "direction")
    )
    hits = CounterMetricFamily("tandem_worker_host_hit_tokens", "Tokens found in the host tier.", labels=WORKER)
    for worker in workers:
        load, meters, labels = worker.link.load, worker.link.meters.latest, _labels(worker)
        if load is None or not load.host_blocks.total:
            continue
        blocks.add_metric((*labels, "free"), load.host_blocks.free)
        blocks.add_metric((*labels, "used"), load.host_blocks.used)
        if meters is not None:
            moved.add_metric((*labels, "out"), meters.host_blocks_out)
            moved.add_metric((*labels, "in"), meters.host_blocks_in)
            hits.add_metric(labels, meters.host_blocks_in * worker.link.info.layout.block_tokens)
    yield from (blocks, moved, hits)


def _utilization(workers: Sequence[Worker]) -> Iterator[Metric]:
    mfu = GaugeMetricFamily("tandem_worker_mfu_ratio", "Share of peak FLOP/s of recent steps.", labels=WORKER)
    mbu = GaugeMetricFamily("tandem_worker_mbu_ratio", "Share of peak memory bandwidth of recent steps.", labels=WORKER)
    now_s = time.monotonic()  # the clock of the links
    for worker in workers:
        history = worker.link.meters
        if (share := history.mfu(now_s)) is not None:
            mfu.add_metric(_labels(worker), share)
        if (share := history.mbu(now_s)) is not None:
            mbu.add_metric(_labels(worker), share)
    yield from (mfu, mbu)


def _links(metered: Sequence[tuple[tuple[str, str, str], worker_pb2.WorkerMeters]]) -> Iterator[Metric]:
    """Links of sending workers, which measure. Ranks of one pair of workers: summed bytes, the slowest latency."""
    sent = CounterMetricFamily("tandem_worker_link_bytes", "KV bytes sent.", labels=LINK)
    speed = GaugeMetricFamily("tandem_worker_link_bytes_per_second", "Recent throughput of handoffs.", labels=LINK)
    latency = GaugeMetricFamily("tandem_worker_link_latency_seconds", "Latency of the fastest probe.", labels=LINK)
    slow = GaugeMetricFamily(
        "tandem_worker_slow_links", "Links over a slower transport than their hardware allows.", labels=LINK
    )
    for labels, meters in metered:
        pairs: dict[tuple[str, str], list[worker_pb2.LinkState]] = {}
        for link in meters.links:
            if link.HasField("latency_s"):
                pairs.setdefault((link.peer_worker, link.transport), []).append(link)
        for pair, links in pairs.items():
            sent.add_metric((*labels, *pair), sum(link.bytes for link in links))
            latency.add_metric((*labels, *pair), max(link.latency_s for link in links))
            slow.add_metric((*labels, *pair), sum(link.state in REACHABLE and bool(link.reason) for link in links))
            if any(link.HasField("bytes_per_s") for link in links):
                speed.add_metric((*labels, *pair), sum(link.bytes_per_s for link in links))
    yield from (sent, speed, latency, slow)
