"""`tandem status`: what the controller knows of every worker, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table

from cluster.admin_client import Admin, find_admin, tls_hint
from tandem.errors import UnavailableError
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2

TIMEOUT_S = 10.0
SHOWN_DECISIONS = 5
ROLES = {cluster_pb2.ROLE_PREFILL: "prefill", cluster_pb2.ROLE_DECODE: "decode"}
STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "restarting": "yellow", "not_ready": "yellow"}


def run_status(as_json: bool, address: str | None, cluster: str | None, tls: Path | None = None) -> int:
    status = asyncio.run(fetch(find_admin(address, cluster, tls)))
    if as_json:
        print(json.dumps(to_json(status), indent=2))
    else:
        show(status, Console(highlight=False))
    return 0


async def fetch(admin: Admin) -> cluster_pb2.ClusterStatus:
    """Raises UnavailableError when no controller answers there."""
    async with admin.channel() as channel:
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        try:
            return await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"--address: no controller answers at {admin.address} ({error.code().name}): is `tandem up` running"
                f"{tls_hint(admin)}?",
                field="--address",
            ) from None


def to_json(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    return {
        "cluster": status.cluster,
        "version": status.version,
        "backend": status.backend,
        "http": status.http_address,
        "grpc": status.grpc_address,
        "redis": status.redis,
        "router_ready": status.router_ready,
        "routers": [
            {
                "id": router.router_id,
                "state": router.state,
                "restarts": router.restarts,
                "http": router.http_address,
                "grpc": router.grpc_address,
            }
            for router in status.routers
        ],
        "processes": _processes(status.processes),
        "autoscaler": {
            "mode": status.autoscaler.mode,
            "outlooks": {each.model: each.words for each in status.autoscaler.outlooks},
            "decisions": [_decision(each) for each in status.autoscaler.decisions],
        },
        "workers": [_worker(worker) for worker in status.workers],
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


def _worker(worker: cluster_pb2.WorkerStatus) -> dict[str, Any]:
    info, load = worker.info, worker.live.load
    blocks = load.blocks
    return {
        "id": info.worker_id,
        "role": ROLES[info.role],
        "model": info.model,
        "tp": info.layout.tp,
        "epoch": info.epoch,
        "state": worker.state,
        "reason": worker.reason,
        "restarts": worker.restarts,
        "address": info.address,
        "blocks": {
            "free": blocks.free,
            "cached": blocks.cached,
            "leased": blocks.leased,
            "in_use": blocks.in_use,
            "total": blocks.total,
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


def show(status: cluster_pb2.ClusterStatus, console: Console) -> None:
    console.print(f"{status.cluster} {status.version}, {status.backend}, redis {status.redis}")
    for router in status.routers:
        state = f"[{STYLES.get(router.state, 'red')}]{router.state}[/]"
        restarts = f"   {router.restarts} restarts" if router.restarts else ""
        addresses = f"HTTP http://{router.http_address}/v1   gRPC {router.grpc_address}"
        console.print(f"{router.router_id} {state}   {addresses}{restarts}", soft_wrap=True)
    _show_autoscaler(status.autoscaler, console)
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "state", "tp", "free", "cached", "leased", "in use", "total", "running"):
        table.add_column(column, justify="left" if column in ("worker", "state") else "right", no_wrap=True)
    for worker in status.workers:
        blocks = worker.live.load.blocks
        table.add_row(
            worker.info.worker_id,
            f"[{STYLES.get(worker.state, 'red')}]{worker.state}[/]",
            str(worker.info.layout.tp),
            *(str(n) for n in (blocks.free, blocks.cached, blocks.leased, blocks.in_use, blocks.total)),
            str(worker.live.load.running_requests),
        )
    console.print(table)
    for worker in status.workers:
        if worker.reason:
            console.print(f"{worker.info.worker_id}: {worker.reason}", markup=False)
        for link in worker.live.links:
            ends = f"{worker.info.worker_id}/{link.rank} – {link.peer_worker}/{link.peer_rank}"
            line = f"link {ends}: {link.transport} {link.state}{_measured(link)}, {_size(link.bytes)} {link.reason}"
            console.print(line.rstrip(), markup=False)


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


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _measured(link: worker_pb2.LinkState) -> str:
    """What the sending end knows of the link's quality; empty on the other."""
    known = []
    if link.HasField("latency_s"):
        known.append(f"{1e6 * link.latency_s:,.0f} µs")
    if link.HasField("bytes_per_s"):
        known.append(f"{link.bytes_per_s / 1e9:.2f} GB/s")
    return f", {', '.join(known)}" if known else ""
