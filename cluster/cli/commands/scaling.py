"""Commands that change a running cluster: `tandem scale`, `ratio`, `drain`, `restart` and `apply`."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from rich.console import Console

from cluster.cli.admin_client import Admin, controller_at, fetch_status
from cluster.control.scaling.pools import check_targets, ratio_split
from tandem.config.model import Role
from tandem.errors import ConfigError, UnavailableError
from tandem.rpc.directory import ROLE_OF
from tandem.v1 import cluster_pb2

WATCH_S = 0.5
ANSWER_S = 5.0
RECONNECT_S = 60.0  # in which another controller takes over


def run_scale(prefill: int | None, decode: int | None, model: str | None, admin: Admin) -> int:
    if prefill is None and decode is None:
        raise ConfigError("--prefill, --decode: expected at least one of them", field="--prefill")
    check_targets(prefill or 0, 1 if decode is None else decode)
    request = cluster_pb2.ScaleRequest(model=model or "", prefill=prefill, decode=decode)
    return asyncio.run(_scale(admin, request))


def run_ratio(ratio: str, model: str | None, admin: Admin) -> int:
    if (parts := re.fullmatch(r"(\d{1,4}):(\d{1,4})", ratio)) is None:
        raise ConfigError(f"RATIO: expected prefill:decode, for example 2:1, got {ratio!r}", field="ratio")
    return asyncio.run(_ratio(admin, int(parts[1]), int(parts[2]), model or ""))


def run_restart(model: str | None, wait: bool, routers: bool, admin: Admin) -> int:
    request = cluster_pb2.RestartWorkersRequest(model=model or "", wait_for_ends=wait, routers=routers)
    return asyncio.run(_restart(admin, request))


def run_watch_restart(model: str | None, wait: bool, routers: bool, admin: Admin) -> int:
    for option, given in (("--model", model), ("--wait", wait), ("--routers", routers)):
        if given:
            raise ConfigError(f"{option}: expected none with --watch, which begins no restart", field=option)
    return asyncio.run(_watch_restart(admin))


def run_drain(worker: str, restart: bool, wait: bool, admin: Admin) -> int:
    request = cluster_pb2.DrainWorkerRequest(worker_id=worker, restart=restart, wait_for_ends=wait)
    return asyncio.run(_drain(admin, request))


def run_apply(file: Path, dry_run: bool, admin: Admin) -> int:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"FILE: {file}: {error.strerror}", field="FILE") from None
    except UnicodeDecodeError:
        raise ConfigError(f"FILE: {file}: expected YAML in UTF-8", field="FILE") from None
    return asyncio.run(_apply(admin, cluster_pb2.ApplyRequest(spec=text, dry_run=dry_run)))


async def _scale(admin: Admin, request: cluster_pb2.ScaleRequest) -> int:
    async with controller_at(admin) as stub:
        answer = await stub.Scale(request)
    for action in answer.actions or ["nothing to do: the pools already have these sizes"]:
        print(action)
    return 0


async def _ratio(admin: Admin, prefill: int, decode: int, model: str) -> int:
    workers = [worker.info for worker in (await fetch_status(admin)).workers if model in ("", worker.info.model)]
    split = ratio_split(prefill, decode, len(workers))
    roles = [ROLE_OF[info.role] for info in workers]
    now = f"{roles.count(Role.PREFILL)}:{roles.count(Role.DECODE)}"
    print(change_text((prefill, decode), split, now))
    return await _scale(admin, cluster_pb2.ScaleRequest(model=model, prefill=split[0], decode=split[1]))


def change_text(asked: tuple[int, int], split: tuple[int, int], now: str) -> str:
    """Describes the change. `split`: the nearest possible split to the ratio that was `asked` for."""
    workers = sum(split)
    text = f"{workers} workers: {now} becomes {split[0]}:{split[1]}"
    if asked[0] * split[1] == asked[1] * split[0]:
        return text
    return f"{text}, the nearest to {asked[0]}:{asked[1]} that {workers} workers allow"


async def _drain(admin: Admin, request: cluster_pb2.DrainWorkerRequest) -> int:
    with Console(stderr=True).status(f"draining {request.worker_id}"):
        async with controller_at(admin) as stub:
            await stub.DrainWorker(request)
    print(f"{request.worker_id} {'is ready again' if request.restart else 'left the cluster'}")
    return 0


async def _restart(admin: Admin, request: cluster_pb2.RestartWorkersRequest) -> int:
    async with controller_at(admin) as stub:
        begun = await stub.RestartWorkers(request)
    return await _watch(admin, begun)


async def _watch_restart(admin: Admin) -> int:
    async with controller_at(admin) as stub:
        found = await stub.GetRestart(cluster_pb2.GetRestartRequest())
    if not found.restart_id:
        raise ConfigError("--watch: no restart of all workers has begun in this cluster", field="--watch")
    return await _watch(admin, found)


async def _watch(admin: Admin, restart: cluster_pb2.RollingRestart) -> int:
    """Only watches: the controllers carry it out. Another one may take over meanwhile, so an unanswered question is
    asked again for RECONNECT_S."""
    told: set[str] = set()
    restart_id, answered_s = restart.restart_id, time.monotonic()
    with Console(stderr=True).status("restarting") as shown:
        while True:
            told |= _tell(restart, told)
            if restart.is_over:
                break
            every = [*restart.router_ids, *restart.worker_ids]
            waiting = [each for each in every if each not in told]
            shown.update(f"restarting {waiting[0] if waiting else ''} ({len(told)} of {len(every)} done)")
            await asyncio.sleep(WATCH_S)
            try:
                async with controller_at(admin) as stub:
                    restart = await stub.GetRestart(cluster_pb2.GetRestartRequest(), timeout=ANSWER_S)
                answered_s = time.monotonic()
            except UnavailableError:
                if time.monotonic() - answered_s > RECONNECT_S:
                    raise
            if restart.restart_id != restart_id:
                raise ConfigError("--watch: another restart has begun since: the one that was watched is over")
    if restart.failure:
        raise UnavailableError(restart.failure)
    return 0


def _tell(restart: cluster_pb2.RollingRestart, told: set[str]) -> set[str]:
    for worker_id in restart.restarted:
        if worker_id not in told:
            print(f"{worker_id} is ready again")
    for worker_id in restart.left:
        if worker_id not in told:
            print(f"{worker_id} left the cluster")
    return {*restart.restarted, *restart.left}


async def _apply(admin: Admin, request: cluster_pb2.ApplyRequest) -> int:
    async with controller_at(admin) as stub:
        answer = await stub.Apply(request)
    for change in answer.changes or ["nothing to do: the cluster already matches the spec"]:
        print(change)
    return 0
