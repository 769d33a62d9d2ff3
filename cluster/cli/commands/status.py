"""`tandem status`: the state of every worker, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.text import Text

from cluster.cli.admin_client import Admin, fetch_status, find_admin
from cluster.cli.console import console, fitted, style_of
from cluster.cli.top.frame import parse_snapshot, worst_of_each
from router.dashboard.snapshot import Snapshot
from router.policies.types import PlacementReason
from tandem.engine.api import Capability
from tandem.errors import UnavailableError
from tandem.rpc.directory import ROLE_OF
from tandem.rpc.identity import WorkerEpoch
from tandem.text.words import plural, size, worker_name
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from worker.wire import lacks

ROUTERS_TIMEOUT_S = 3.0
SHOWN_DECISIONS = 5
COLUMNS = (
    "worker", "role", "state", "health", "epoch", "restarts", "tp", "free", "cached", "leased", "in use", "total",
    "running",
)  # fmt: skip
# Dropped first on a narrow terminal; --json has all columns.
SPARE = ("tp", "total", "running", "free", "cached", "epoch")

WHY_LOCAL = {
    PlacementReason.LOCAL_SHORT_SUFFIX: "{limit} uncached tokens (router.local_prefill_max_tokens)",
    PlacementReason.LOCAL_SOONER: "clearly sooner than a handoff",
    PlacementReason.LOCAL_PREFILL_FULL: "no prefill worker had room",
    PlacementReason.LOCAL_NO_PREFILL_WORKER: "no prefill worker was ready",
    PlacementReason.LOCAL_PREFILL_FAILED: "every prefill worker had failed the request",
    PlacementReason.LOCAL_CONFIGURED: "router.disaggregation is never",
}

Health = Mapping[WorkerEpoch, str]  # the worst state that any router reports
Placements = Mapping[str, int]  # by reason, of all routers since their start


def run_status(as_json: bool, address: str | None, cluster: str | None, tls: Path | None = None) -> int:
    status, views = asyncio.run(_fetch_both(find_admin(address, cluster, tls)))
    health, placements = health_of(views), placements_of(views) if views else None
    if as_json:
        print(json.dumps(to_json(status, health, placements), indent=2))
    else:
        show(status, console(), health, placements)
    return 0


async def _fetch_both(admin: Admin) -> tuple[cluster_pb2.ClusterStatus, list[Snapshot]]:
    return await asyncio.gather(fetch_status(admin), fetch_views(admin))


async def fetch_views(admin: Admin) -> list[Snapshot]:
    """The routers' snapshots. Empty if no router answers."""
    async with admin.channel() as channel:
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        try:
            found = await stub.ListSnapshots(cluster_pb2.ListSnapshotsRequest(), timeout=ROUTERS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return []
    return [view for each in found.snapshots if (view := _readable(each.json)) is not None]


def health_of(views: Iterable[Snapshot]) -> Health:
    return {(each.worker_id, int(each.epoch)): each.health for each in worst_of_each(views) if each.health is not None}


def placements_of(views: Iterable[Snapshot]) -> Placements:
    placements: Counter[str] = Counter()
    for view in views:
        placements.update(view.placements)
    return placements


def _readable(snapshot: bytes) -> Snapshot | None:
    """None if the router has another version."""
    try:
        return parse_snapshot(snapshot)
    except UnavailableError:
        return None


def to_json(
    status: cluster_pb2.ClusterStatus, health: Health | None = None, placements: Placements | None = None
) -> dict[str, Any]:
    """`placements` None: no router answered."""
    return {
        "cluster": status.cluster,
        "version": status.version,
        "backend": status.backend,
        "http": status.http_address,
        "http_scheme": status.http_scheme,
        "logs": status.log_dir,
        "grpc": status.grpc_address,
        "redis": status.redis,
        "router_ready": status.router_ready,
        "task_failures": dict(status.task_failures),
        "models": [
            {
                "name": model.name,
                "tool_parser": model.tool_parser,
                "reasoning_parser": model.reasoning_parser,
                "adapters": [each.name for each in model.adapters if each.served],
            }
            for model in status.models
        ],
        "routers": [
            {
                "id": router.router_id,
                "state": router.state,
                "restarts": router.restarts,
                "http": router.http_address,
                "grpc": router.grpc_address,
                "joined": router.has_joined,
            }
            for router in status.routers
        ],
        "processes": _processes(status.processes),
        "placements": None if placements is None else dict(placements),
        "local_prefill_max_tokens": _local_prefill_max_tokens(status),
        "autoscaler": {
            "mode": status.autoscaler.mode,
            "outlooks": {each.model: each.words for each in status.autoscaler.outlooks},
            "decisions": [_decision(each) for each in status.autoscaler.decisions],
        },
        "workers": [_worker(worker, health or {}) for worker in status.workers],
    }


def _decision(decision: cluster_pb2.ScalingDecision) -> dict[str, Any]:
    return {
        "at_unix_s": decision.at_unix_s,
        "model": decision.model,
        "action": decision.action,
        "prefill": decision.prefill,
        "decode": decision.decode,
        "reason": decision.reason,
        "outcome": decision.outcome,
    }


def _worker(worker: cluster_pb2.WorkerStatus, health: Health) -> dict[str, Any]:
    info, load = worker.info, worker.live.load
    blocks = load.blocks
    return {
        "id": info.worker_id,
        "role": ROLE_OF[info.role],
        "model": info.model,
        "tp": info.layout.tp,
        "epoch": info.epoch,
        "state": worker.state,
        "health": health.get((info.worker_id, info.epoch)),
        "reason": worker.reason,
        "restarts": worker.restarts,
        "address": info.address,
        "cannot": sorted(lacks(info)),
        "blocks": {
            "free": blocks.free,
            "cached": blocks.cached,
            "leased": blocks.leased,
            "in_use": blocks.in_use,
            "total": blocks.total,
        },
        "host_blocks": {
            "free": load.host_blocks.free,
            "used": load.host_blocks.used,
            "total": load.host_blocks.total,
        },
        "requests": {"waiting": load.waiting_requests, "running": load.running_requests},
        "steps": worker.live.steps,
        "ends": dict(worker.live.request_ends),
        "handoff_failures": dict(worker.live.handoff_failures),
        "links": [
            {
                "rank": link.rank,
                "peer": link.peer_worker,
                "peer_rank": link.peer_rank,
                "transport": link.transport,
                "state": link.state,
                "reason": link.reason,
                "bytes": link.bytes,
                "latency_s": link.latency_s if link.HasField("latency_s") else None,
                "bytes_per_s": link.bytes_per_s if link.HasField("bytes_per_s") else None,
            }
            for link in worker.live.links
        ],
        "processes": _processes(info.processes),
    }


def _processes(processes: Any) -> list[dict[str, Any]]:
    return [{"name": process.name, "pid": process.pid} for process in processes]


def _local_prefill_max_tokens(status: cluster_pb2.ClusterStatus) -> int | None:
    """None: the controller is of an earlier version."""
    return status.local_prefill_max_tokens if status.HasField("local_prefill_max_tokens") else None


def show(
    status: cluster_pb2.ClusterStatus,
    console: Console,
    health: Health | None = None,
    placements: Placements | None = None,
) -> None:
    console.print(f"{status.cluster} {status.version}, {status.backend}, redis {status.redis}")
    for router in status.routers:
        state = f"[{style_of(router.state, 'red')}]{router.state}[/]{', joined' if router.has_joined else ''}"
        restarts = f"   {router.restarts} restarts" if router.restarts else ""
        addresses = f"HTTP {status.http_scheme}://{router.http_address}/v1   gRPC {router.grpc_address}"
        console.print(f"{router.router_id} {state}   {addresses}{restarts}", soft_wrap=True)
    for model in status.models:
        console.print(f"{model.name}: tool calls {model.tool_parser}, reasoning {model.reasoning_parser}", markup=False)
        for adapter in model.adapters:
            console.print(_adapter_line(adapter, status.workers), markup=False, soft_wrap=True)
    if words := _local_prefill(placements or {}, _local_prefill_max_tokens(status)):
        console.print(words, markup=False, soft_wrap=True)
    _show_autoscaler(status.autoscaler, console)
    rows = [_row(worker, health or {}) for worker in status.workers]
    console.print(fitted(console.width, COLUMNS, rows, left=("worker", "role", "state", "health"), spare=SPARE))
    names = {each.info.worker_id: worker_name(each.info.worker_id, ROLE_OF[each.info.role]) for each in status.workers}
    for lacking, some in _by_what_they_lack(status.workers).items():
        engines = ", ".join(names[worker_id] for worker_id in some)
        console.print(f"{engines}: engine without {', '.join(lacking)}", markup=False, soft_wrap=True)
    for worker in status.workers:
        name = names[worker.info.worker_id]
        if worker.reason:
            console.print(f"{name}: {worker.reason}", markup=False)
        for link in worker.live.links:
            ends = f"{name}/{link.rank} – {names.get(link.peer_worker, link.peer_worker)}/{link.peer_rank}"
            reason = f": {link.reason}" if link.reason else ""
            line = f"link {ends}: {link.transport} {link.state}{_measured(link)}, {size(link.bytes)}{reason}"
            console.print(line, markup=False)
    if status.task_failures:
        counts = ", ".join(f"{task} {count}" for task, count in sorted(status.task_failures.items()))
        console.print(f"[yellow]failures of the controller's tasks, which were started again[/]: {counts}")
    if status.log_dir:
        console.print(f"logs: {status.log_dir}", markup=False, soft_wrap=True)


def _by_what_they_lack(workers: Iterable[cluster_pb2.WorkerStatus]) -> dict[tuple[str, ...], list[str]]:
    """The ready workers whose engines cannot do all that Tandem's own does with a model of text."""
    found: dict[tuple[str, ...], list[str]] = {}
    for worker in workers:
        if worker.state == "ready" and (lacking := tuple(sorted(lacks(worker.info) - {Capability.IMAGES}))):
            found.setdefault(lacking, []).append(worker.info.worker_id)
    return found


def _local_prefill(placements: Placements, max_tokens: int | None) -> str:
    """How many requests were prefilled on their decode worker, and why. Empty if none were."""
    counts = {reason: count for reason in WHY_LOCAL if (count := placements.get(reason.value, 0))}
    if not counts:
        return ""
    limit = "few" if max_tokens is None else f"at most {max_tokens}"
    reasons = "; ".join(f"{count} {WHY_LOCAL[reason].format(limit=limit)}" for reason, count in counts.items())
    return f"local prefill: {sum(counts.values())} of {plural(sum(placements.values()), 'placement')}: {reasons}"


def _adapter_line(adapter: cluster_pb2.ModelAdapter, workers: Iterable[cluster_pb2.WorkerStatus]) -> str:
    states = [worker.live for worker in workers if worker.info.model == adapter.model]
    having = sum(adapter.fingerprint in state.adapters.fingerprints for state in states)
    served = "" if adapter.served else ", not served yet"
    failed = {
        state.failed_adapters[adapter.fingerprint] for state in states if adapter.fingerprint in state.failed_adapters
    }
    served += f": {'; '.join(sorted(failed))}" if failed else ""
    return f"{adapter.name}: adapter of {adapter.model}, on {having} of {plural(len(states), 'worker')}{served}"


def _row(worker: cluster_pb2.WorkerStatus, health: Health) -> list[str | Text]:
    info, load = worker.info, worker.live.load
    blocks = load.blocks
    known = health.get((info.worker_id, info.epoch))
    figures = (
        info.epoch, worker.restarts, info.layout.tp, blocks.free, blocks.cached, blocks.leased, blocks.in_use,
        blocks.total, load.running_requests,
    )  # fmt: skip
    return [
        info.worker_id,
        ROLE_OF[info.role],
        Text(worker.state, style_of(worker.state, "red")),
        Text(known, style_of(known, "red")) if known else "–",
        *map(str, figures),
    ]


def _show_autoscaler(autoscaler: cluster_pb2.Autoscaler, console: Console) -> None:
    if autoscaler.mode in ("", "off"):
        return
    mode = autoscaler.mode.replace("_", " ")
    for outlook in autoscaler.outlooks:
        console.print(f"autoscaler {mode}, {outlook.model}: {outlook.words}", markup=False, soft_wrap=True)
    for each in autoscaler.decisions[:SHOWN_DECISIONS]:
        at = time.strftime("%H:%M:%S", time.localtime(each.at_unix_s))
        outcome = each.outcome.replace("_", " ")
        console.print(f"  {at} {each.model} {each.reason} ({outcome})", markup=False, soft_wrap=True)


def _measured(link: worker_pb2.LinkState) -> str:
    """Latency and bandwidth of the link, which only the sending end measures; empty on the other end."""
    known = []
    if link.HasField("latency_s"):
        known.append(f"{1e6 * link.latency_s:,.0f} µs")
    if link.HasField("bytes_per_s"):
        known.append(f"{link.bytes_per_s / 1e9:.2f} GB/s")
    return f", {', '.join(known)}" if known else ""
