"""`tandem status`: what it shows of workers, routers and links, whoever of them answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from rich.console import Console

from cluster.cli.admin_client import Admin
from cluster.cli.commands.status import (
    ROUTERS_TIMEOUT_S,
    WHY_LOCAL,
    fetch_views,
    health_of,
    placements_of,
    run_status,
    show,
    to_json,
)
from cluster.control.router_traces import RouterTraces
from cluster.control.status_report import drop_stale_links
from router.policies.types import PlacementReason
from tandem.errors import UnavailableError
from tandem.rpc.grpc_errors import abort
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2, trace_pb2_grpc, worker_pb2

EPOCH = 4611686018427387904


def worker(worker_id: str, role: cluster_pb2.Role.ValueType, *peers: str, **fields: Any) -> cluster_pb2.WorkerStatus:
    info = cluster_pb2.WorkerInfo(worker_id=worker_id, epoch=EPOCH, role=role, model="tiny")
    links = [worker_pb2.LinkState(peer_worker=peer, transport="mapped", state="down") for peer in peers]
    live = worker_pb2.WorkerState(links=links)
    return cluster_pb2.WorkerStatus(info=info, live=live, **{"state": "ready", **fields})


def status() -> cluster_pb2.ClusterStatus:
    return cluster_pb2.ClusterStatus(
        cluster="c", version="1", http_scheme="https", log_dir="/logs/c-1",
        routers=[cluster_pb2.RouterStatus(router_id="router-0", state="ready", http_address="h:1")],
        workers=[
            worker("decode-0", cluster_pb2.ROLE_PREFILL, restarts=3),
            worker("decode-1", cluster_pb2.ROLE_DECODE),
        ],
    )  # fmt: skip


def shown(width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    show(status(), console, {("decode-1", EPOCH): "ejected"})
    return console.export_text()


def test_each_workers_role_health_epoch_and_restarts_are_shown() -> None:
    rows = [line.split() for line in shown(200).splitlines() if line.startswith("decode")]
    assert rows[0][:6] == ["decode-0", "prefill", "ready", "–", str(EPOCH), "3"]
    assert rows[1][:6] == ["decode-1", "decode", "ready", "ejected", str(EPOCH), "0"]


def test_a_worker_whose_id_names_another_role_is_told_with_its_own_outside_the_table() -> None:
    told = status()
    told.workers[0].reason = "the disk is full"
    told.workers[1].live.links.add(peer_worker="decode-0", transport="mapped", state="ready")
    console = Console(width=120, file=io.StringIO(), record=True)
    show(told, console, {})
    lines = console.export_text().splitlines()
    assert "decode-0 (prefill): the disk is full" in lines
    assert any(line.startswith("link decode-1/0 – decode-0 (prefill)/0: ") for line in lines)
    assert [line.split()[:2] for line in lines if " ready " in line and line.startswith("decode")] == [
        ["decode-0", "prefill"], ["decode-1", "decode"]
    ], "the table has the id that `tandem drain` takes"  # fmt: skip


def test_eighty_columns_shorten_no_name_and_leave_the_promised_columns() -> None:
    text = shown(80)
    assert "…" not in text
    for part in ("role", "health", "epoch", "restarts", "leased", "in use", "decode-1", str(EPOCH)):
        assert part in text, part


def test_what_an_engine_cannot_do_is_told_once_for_all_its_workers() -> None:
    """A worker from before there were capabilities can do what Tandem's engine could then."""
    told = status()
    for each in told.workers:
        each.info.can.names.append("grammars")
    told.workers.append(worker("decode-2", cluster_pb2.ROLE_DECODE))
    told.workers.append(worker("decode-3", cluster_pb2.ROLE_DECODE))
    told.workers[-1].info.can.names.extend(["embeddings", "grammars", "moves", "prompt_logprobs", "of a later version"])
    console = Console(width=200, file=io.StringIO(), record=True)
    show(told, console, {})
    lines = [line for line in console.export_text().splitlines() if "without" in line]
    assert lines == [
        "decode-0 (prefill), decode-1: engine without embeddings, moves, prompt_logprobs",
        "decode-2: engine without embeddings",
    ]
    lacking = [each["cannot"] for each in to_json(told)["workers"]]
    assert lacking == [["embeddings", "images", "moves", "prompt_logprobs"]] * 2 + [
        ["embeddings", "images"],
        ["images"],
    ]


def test_the_scheme_of_the_edge_and_the_logs_are_told() -> None:
    assert "https://h:1/v1" in shown(200)
    assert "logs: /logs/c-1" in shown(200)
    found = to_json(status())
    assert (found["http_scheme"], found["logs"]) == ("https", "/logs/c-1")


def test_failures_of_the_controllers_own_tasks_are_told() -> None:
    told = status()
    told.task_failures["node drainer"] = 2
    console = Console(width=80, file=io.StringIO(), record=True)
    show(told, console, {})
    assert "node drainer 2" in console.export_text()
    assert to_json(told)["task_failures"] == {"node drainer": 2}


def test_health_is_in_the_json_and_null_where_no_router_tells() -> None:
    workers = to_json(status(), {("decode-1", EPOCH): "suspect"})["workers"]
    assert [each["health"] for each in workers] == [None, "suspect"]
    assert [each["restarts"] for each in workers] == [3, 0]


def local_prefill(placements: dict[str, int], **fields: Any) -> list[str]:
    console = Console(width=80, file=io.StringIO(), record=True)
    told = status()
    told.MergeFrom(cluster_pb2.ClusterStatus(**fields))
    show(told, console, {}, placements)
    return [line for line in console.export_text().splitlines() if line.startswith("local prefill")]


def test_local_prefills_are_shown_with_their_reasons_and_the_setting() -> None:
    placements = {"handoff_as_soon": 3, "local_sooner": 2, "local_short_suffix": 5}
    assert local_prefill(placements, local_prefill_max_tokens=32) == [
        "local prefill: 7 of 10 placements: 5 at most 32 uncached tokens (router.local_prefill_max_tokens); "
        "2 clearly sooner than a handoff"
    ]
    assert local_prefill({"local_short_suffix": 1}) == [
        "local prefill: 1 of 1 placement: 1 few uncached tokens (router.local_prefill_max_tokens)"
    ]


def test_no_line_is_shown_while_every_prompt_was_handed_off() -> None:
    assert local_prefill({"handoff_configured": 3}, local_prefill_max_tokens=32) == []
    assert local_prefill({}, local_prefill_max_tokens=32) == []


def test_every_reason_for_local_prefill_has_words() -> None:
    assert set(WHY_LOCAL) == {reason for reason in PlacementReason if reason.value.startswith("local_")}


def test_placements_and_the_limit_are_in_the_json_and_null_if_unknown() -> None:
    told = status()
    assert (to_json(told)["placements"], to_json(told)["local_prefill_max_tokens"]) == (None, None)
    told.local_prefill_max_tokens = 0
    found = to_json(told, placements={"local_sooner": 2})
    assert (found["placements"], found["local_prefill_max_tokens"]) == ({"local_sooner": 2}, 0)


def test_links_that_are_down_inside_a_pool_or_to_a_worker_that_left_are_not_shown() -> None:
    roles = cluster_pb2.Role
    workers = [
        worker("a", roles.ROLE_PREFILL, "b", "c", "gone"),
        worker("b", roles.ROLE_PREFILL, "a", "c"),
        worker("c", roles.ROLE_DECODE, "a"),
        cluster_pb2.WorkerStatus(info=cluster_pb2.WorkerInfo(worker_id="d", role=roles.ROLE_DECODE)),
    ]
    workers[1].live.links[0].state = "ready"  # a request moves between two of one pool just now
    drop_stale_links(workers)
    left = [[link.peer_worker for link in each.live.links] for each in workers]
    assert left == [["c"], ["a", "c"], ["a"], []]


class Controller(cluster_pb2_grpc.ClusterServicer):
    """`answers` None: no router answers it."""

    answers: list[dict[str, Any]] | None = None

    async def GetStatus(self, request: Any, context: Any) -> cluster_pb2.ClusterStatus:
        return status()

    async def ListSnapshots(self, request: Any, context: Any) -> cluster_pb2.ListSnapshotsResponse:
        if self.answers is None:
            await abort(context, UnavailableError("no router was started yet; try again"))
        snapshots = [trace_pb2.RouterSnapshot(json=json.dumps(each).encode()) for each in self.answers or []]
        return cluster_pb2.ListSnapshotsResponse(snapshots=snapshots)


@pytest.fixture
async def controller() -> AsyncIterator[tuple[Controller, Admin]]:
    servicer, server = Controller(), grpc.aio.server()  # type: ignore[abstract]  # other calls are not made
    cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer, Admin(address)
    await server.stop(None)


async def test_routers_that_are_absent_or_of_another_version_do_not_hurt(
    controller: tuple[Controller, Admin],
) -> None:
    servicer, admin = controller
    assert await fetch_views(admin) == []
    servicer.answers = [{"version": 99}]
    assert await fetch_views(admin) == []
    assert (health_of([]), placements_of([])) == ({}, {})


async def test_the_json_has_no_placements_if_no_router_answers(
    controller: tuple[Controller, Admin], capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(run_status, True, controller[1].address, None)
    assert json.loads(capsys.readouterr().out)["placements"] is None


class Router(trace_pb2_grpc.TracesServicer):
    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    async def GetSnapshot(self, request: Any, context: Any) -> trace_pb2.RouterSnapshot:
        if self.hangs:
            await asyncio.sleep(60)
        return trace_pb2.RouterSnapshot(json=b"{}")


async def test_a_router_that_hangs_does_not_hide_the_others() -> None:
    servers = [grpc.aio.server(), grpc.aio.server()]
    addresses = {}
    for number, server in enumerate(servers):
        router = Router(hangs=number == 0)  # type: ignore[abstract]  # other calls are not made
        trace_pb2_grpc.add_TracesServicer_to_server(router, server)
        addresses[f"router-{number}"] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    try:
        async with asyncio.timeout(ROUTERS_TIMEOUT_S):
            found = await RouterTraces(addresses, "secret").snapshots()
    finally:
        for server in servers:
            await server.stop(None)
    assert [each.json for each in found.snapshots] == [b"{}"]
