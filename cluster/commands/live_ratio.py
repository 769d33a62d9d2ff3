"""`tandem scale`, `tandem ratio` and `tandem drain`: changes of a running cluster, by its admin service."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from rich.console import Console

from cluster import state_file
from cluster.commands.status import ROLES, fetch
from cluster.pools import check_targets, ratio_split
from tandem.config import Role
from tandem.errors import ConfigError, UnavailableError
from tandem.grpc_errors import error_from_rpc
from tandem.v1 import cluster_pb2, cluster_pb2_grpc


def run_scale(
    prefill: int | None, decode: int | None, model: str | None, address: str | None, cluster: str | None
) -> int:
    if prefill is None and decode is None:
        raise ConfigError("--prefill, --decode: expected at least one of them", field="--prefill")
    check_targets(prefill or 0, 1 if decode is None else decode)
    request = cluster_pb2.ScaleRequest(model=model or "", prefill=prefill, decode=decode)
    return asyncio.run(_scale(address or state_file.find(cluster).admin, request))


def run_ratio(ratio: str, model: str | None, address: str | None, cluster: str | None) -> int:
    if (parts := re.fullmatch(r"(\d{1,4}):(\d{1,4})", ratio)) is None:
        raise ConfigError(f"RATIO: expected prefill:decode, as in 2:1, got {ratio!r}", field="ratio")
    at = address or state_file.find(cluster).admin
    return asyncio.run(_ratio(at, int(parts[1]), int(parts[2]), model or ""))


def run_drain(worker: str, restart: bool, wait: bool, address: str | None, cluster: str | None) -> int:
    request = cluster_pb2.DrainWorkerRequest(worker_id=worker, restart=restart, wait_for_ends=wait)
    return asyncio.run(_drain(address or state_file.find(cluster).admin, request))


async def _scale(address: str, request: cluster_pb2.ScaleRequest) -> int:
    async with _controller(address) as stub:
        answer = await stub.Scale(request)
    for action in answer.actions or ["nothing to do: the pools have these sizes"]:
        print(action)
    return 0


async def _ratio(address: str, prefill: int, decode: int, model: str) -> int:
    workers = [worker.info for worker in (await fetch(address)).workers if model in ("", worker.info.model)]
    split = ratio_split(prefill, decode, len(workers))
    roles = [ROLES[info.role] for info in workers]
    print(
        f"{len(workers)} workers: {roles.count(Role.PREFILL.value)}:{roles.count(Role.DECODE.value)} becomes "
        f"{split[0]}:{split[1]}"
    )
    return await _scale(address, cluster_pb2.ScaleRequest(model=model, prefill=split[0], decode=split[1]))


async def _drain(address: str, request: cluster_pb2.DrainWorkerRequest) -> int:
    with Console(stderr=True).status(f"draining {request.worker_id}"):
        async with _controller(address) as stub:
            await stub.DrainWorker(request)
    print(f"{request.worker_id} {'is back' if request.restart else 'left'}")
    return 0


@asynccontextmanager
async def _controller(address: str) -> AsyncIterator[cluster_pb2_grpc.ClusterAsyncStub]:
    """Raises what the controller refused with, or UnavailableError."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield cluster_pb2_grpc.ClusterStub(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                raise UnavailableError(
                    f"--address: no controller answers at {address}: is `tandem up` running?", field="--address"
                ) from None
            raise error_from_rpc(error) from None
