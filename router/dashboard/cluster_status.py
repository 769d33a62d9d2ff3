"""Adds the controller's status to a router's snapshot: workers that are not ready, other routers, links' figures."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from router.dashboard import snapshot
from router.dashboard.events import EventKind, Severity
from router.dashboard.snapshot import FlowRow, RouterRow, Snapshot, WorkerRow
from tandem.rpc.directory import ROLE_OF
from tandem.v1 import cluster_pb2, worker_pb2

_SEVERITIES = {"done": Severity.GOOD, "under_way": Severity.INFO, "dry_run": Severity.INFO}
_STATES = ("ready", "idle", "connecting", "down", "refused")  # best first


def with_status(view: Snapshot, status: cluster_pb2.ClusterStatus) -> Snapshot:
    """A new snapshot: `view` with the controller's status."""
    workers = with_all_workers(view.workers, status)
    routers = [RouterRow(each.router_id, each.state, each.restarts, each.http_address) for each in status.routers]
    return msgspec.structs.replace(
        view,
        controller=True,
        routers=routers,
        workers=workers,
        flows=with_links(view.flows, status),
        scaling=with_autoscaler(scaling(workers), status.autoscaler),
    )


def with_all_workers(seen: Iterable[WorkerRow], status: cluster_pb2.ClusterStatus) -> list[WorkerRow]:
    """All workers, in the controller's order, then those it does not list.

    `seen`: rows of routers, which have health and pace.
    """
    by_key = {(each.worker_id, each.epoch): each for each in seen}
    workers = [_worker(each, by_key.get((each.info.worker_id, str(each.info.epoch)))) for each in status.workers]
    listed = {each.worker_id for each in workers}
    return [*workers, *(each for each in by_key.values() if each.worker_id not in listed)]


def with_links(seen: Iterable[FlowRow], status: cluster_pb2.ClusterStatus) -> list[FlowRow]:
    """The flows that routers saw, and a row for each other pair of workers with links."""
    flows = {(each.prefill_worker, each.decode_worker): each for each in seen}
    for worker in status.workers:
        if worker.info.role != cluster_pb2.ROLE_PREFILL:
            continue
        by_peer: dict[str, list[worker_pb2.LinkState]] = {}
        for link in worker.live.links:
            by_peer.setdefault(link.peer_worker, []).append(link)
        for peer, links in by_peer.items():
            pair = worker.info.worker_id, peer
            flows[pair] = _linked(flows.get(pair) or FlowRow(*pair), links)
    return list(flows.values())


def scaling(workers: Iterable[WorkerRow]) -> snapshot.Scaling:
    pools = [(each.role, each.state == "ready") for each in workers]
    return snapshot.Scaling(
        prefill_ready=pools.count(("prefill", True)),
        prefill_total=sum(role == "prefill" for role, _ in pools),
        decode_ready=pools.count(("decode", True)),
        decode_total=sum(role == "decode" for role, _ in pools),
        autoscaler="off",
        decisions=[],
    )


def with_autoscaler(scaling: snapshot.Scaling, autoscaler: cluster_pb2.Autoscaler) -> snapshot.Scaling:
    outlook = "; ".join(each.words for each in autoscaler.outlooks)
    mode = (autoscaler.mode or "off").replace("_", " ")
    return msgspec.structs.replace(
        scaling,
        autoscaler=f"{mode}: {outlook}" if outlook else mode,
        decisions=[
            snapshot.EventRow(
                kind=EventKind.SCALING,
                severity=_SEVERITIES.get(each.outcome, Severity.BAD),
                subject=each.model,
                text=f"{each.reason} ({each.outcome.replace('_', ' ')})",
                first_unix_s=each.at_unix_s,
                last_unix_s=each.at_unix_s,
                times=1,
            )
            for each in autoscaler.decisions
        ],
    )


def with_load(worker: WorkerRow, load: worker_pb2.WorkerLoad) -> WorkerRow:
    blocks = load.blocks
    return msgspec.structs.replace(
        worker,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        reserved_requests=load.reserved_requests,
        waiting_tokens=load.waiting_tokens,
        blocks=snapshot.Blocks(blocks.free, blocks.cached, blocks.leased, blocks.in_use, blocks.total),
    )


def _worker(status: cluster_pb2.WorkerStatus, seen: WorkerRow | None) -> WorkerRow:
    """`seen`: the row of a router for the same epoch, if any."""
    if seen is not None and status.state == "ready":
        known = msgspec.structs.replace(seen, restarts=status.restarts)
        # The controller's load is newer: routers get reports only while they have requests on the worker.
        return with_load(known, status.live.load) if status.HasField("live") else known
    row = WorkerRow(
        worker_id=status.info.worker_id,
        role=ROLE_OF.get(status.info.role, "unknown"),
        model=status.info.model,
        epoch=str(status.info.epoch),
        tp=status.info.layout.tp,
        state=status.state,
        health=None if seen is None else seen.health,
        reason=status.reason,
        restarts=status.restarts,
    )
    return with_load(row, status.live.load)


def _linked(flow: FlowRow, links: list[worker_pb2.LinkState]) -> FlowRow:
    """Adds the links of all pairs of ranks: the worst state, the highest latency, the summed throughput."""
    latencies = [each.latency_s for each in links if each.HasField("latency_s")]
    speeds = [each.bytes_per_s for each in links if each.HasField("bytes_per_s")]
    return msgspec.structs.replace(
        flow,
        state=max((each.state for each in links), key=lambda state: _STATES.index(state) if state in _STATES else 0),
        transport=", ".join(sorted({each.transport for each in links if each.transport})) or None,
        latency_s=max(latencies, default=None),
        link_bytes_per_s=sum(speeds) if speeds else None,
    )
