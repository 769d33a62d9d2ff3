"""`tandem status`: what it shows of workers, routers and links, whoever of them answers."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from rich.console import Console

from cluster.cli.admin_client import Admin
from cluster.cli.commands.status import fetch_health, show, to_json
from cluster.control.status_report import drop_stale_links
from tandem.errors import UnavailableError
from tandem.rpc.grpc_errors import abort
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2, worker_pb2

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


def test_eighty_columns_shorten_no_name_and_leave_the_promised_columns() -> None:
    text = shown(80)
    assert "…" not in text
    for part in ("role", "health", "epoch", "restarts", "leased", "in use", "decode-1", str(EPOCH)):
        assert part in text, part


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
    assert await fetch_health(admin) == {}
    servicer.answers = [{"version": 99}]
    assert await fetch_health(admin) == {}
