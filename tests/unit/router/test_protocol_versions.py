"""The real link of a router and the real service of a worker, each with the versions of another release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from router.testing.stub_worker import until
from router.workers.directory import DirectoryFollower
from router.workers.link import WorkerLink
from tandem.rpc.versions import Versions
from tandem.v1 import cluster_pb2, worker_pb2
from worker.service import WorkerService
from worker.wire import BEFORE_RANGES

BEFORE, NOW, NEXT, FAR = Versions(3, 3), Versions(4, 3), Versions(5, 4), Versions(6, 5)


class Listener:
    def link_changed(self, link: WorkerLink) -> None: ...

    def load_changed(self, link: WorkerLink) -> None: ...

    def work_began(self, link: WorkerLink) -> None: ...


class Leader:
    """As much of `LeaderLink` as a session without requests needs."""

    died = False

    def __init__(self) -> None:
        self.channel = SimpleNamespace(send=lambda message: None)
        self.routers: list[str] = []

    def open_session(self, router_id: str) -> tuple[int, asyncio.Queue[bytes | None]]:
        self.routers.append(router_id)
        return len(self.routers), asyncio.Queue()

    def close_session(self, session: int) -> None: ...


Serve = Callable[..., AbstractAsyncContextManager[WorkerLink]]


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Serve:
    @asynccontextmanager
    async def serve(router: Versions, worker: Versions, *, registered: Versions | None) -> AsyncIterator[WorkerLink]:
        """`registered`: what the directory says of the worker; None: it is of a release that registers no range."""
        monkeypatch.setattr("router.workers.link.VERSIONS", router)
        monkeypatch.setattr("worker.service.VERSIONS", worker)
        service = WorkerService(cast(Any, SimpleNamespace(worker_id="decode-0", epoch=1)), cast(Any, Leader()))
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        info = cluster_pb2.WorkerInfo(worker_id="decode-0", epoch=1, address=f"127.0.0.1:{port}")
        if registered is not None:
            info.protocol, info.oldest_protocol = registered.protocol, registered.oldest_protocol
        link = WorkerLink(info, "router-0", Listener())
        link.start()
        try:
            yield link
        finally:
            await link.close()
            await server.stop(None)

    return serve


@pytest.mark.acceptance(28, here="today's code with the versions of the releases around it")
@pytest.mark.parametrize(
    ("router", "worker"), [(NOW, NOW), (NOW, BEFORE), (BEFORE, NOW), (NEXT, NOW), (NOW, NEXT)], ids=str
)
async def test_routers_and_workers_one_release_apart_speak_the_older_version(
    linked: Serve, router: Versions, worker: Versions
) -> None:
    async with linked(router, worker, registered=worker) as link:
        await until(lambda: link.ready)


async def test_a_worker_that_registers_no_range_is_asked_for_the_only_version_it_can_have(linked: Serve) -> None:
    """As 0.1.0 is, which demands that version."""
    only = Versions(BEFORE_RANGES, BEFORE_RANGES)
    async with linked(Versions(BEFORE_RANGES + 1, BEFORE_RANGES), only, registered=None) as link:
        await until(lambda: link.ready)


@pytest.mark.parametrize(
    ("router", "worker", "registered"),
    [(FAR, NOW, NOW), (NOW, FAR, FAR), (NOW, FAR, NOW)],
    ids=["by the older worker's registration", "by the newer one's", "by the worker itself"],
)
async def test_two_releases_apart_are_refused_once_with_both_ranges_and_what_to_do(
    linked: Serve, caplog: pytest.LogCaptureFixture, router: Versions, worker: Versions, registered: Versions
) -> None:
    def refusals() -> list[str]:
        return [each.getMessage() for each in caplog.records if "no link to" in each.getMessage()]

    older = "router router-0" if router.protocol < worker.protocol else "decode-0"
    with caplog.at_level(logging.ERROR):
        async with linked(router, worker, registered=registered) as link:
            await until(lambda: bool(refusals()))
            assert not link.ready
    [refusal] = refusals()
    assert f"{NOW.oldest_protocol} to {NOW.protocol}" in refusal
    assert f"{FAR.oldest_protocol} to {FAR.protocol}" in refusal
    assert f"update {older} first" in refusal


Asked = list[cluster_pb2.WatchDirectoryRequest]


@asynccontextmanager
async def following(versions: Versions) -> AsyncIterator[tuple[Asked, list[cluster_pb2.Directory]]]:
    """A controller of another release, what was asked of it, and what a router took from it."""
    asked, came = Asked(), list[cluster_pb2.Directory]()

    async def watch(request: cluster_pb2.WatchDirectoryRequest, context: Any) -> AsyncIterator[bytes]:
        asked.append(request)
        directory = cluster_pb2.Directory(version=1)
        directory.protocol, directory.oldest_protocol = versions.protocol, versions.oldest_protocol
        yield directory.SerializeToString()
        await asyncio.Event().wait()

    server = grpc.aio.server()
    reads: Any = cluster_pb2.WatchDirectoryRequest.FromString
    calls: dict[str, Any] = {"WatchDirectory": grpc.unary_stream_rpc_method_handler(watch, reads)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.v1.Cluster", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    follower = DirectoryFollower(f"127.0.0.1:{port}", "router-0", came.append)
    follower.start()
    try:
        yield asked, came
    finally:
        await follower.close()
        await server.stop(None)


@pytest.mark.parametrize("controller", [Versions(0, 0), Versions(1, 1), Versions(2, 1)], ids=str)
async def test_a_router_follows_a_controller_of_the_next_release_and_one_that_states_nothing(
    controller: Versions,
) -> None:
    async with following(controller) as (asked, came):
        await until(lambda: bool(came))
    assert (asked[0].protocol, asked[0].oldest_protocol) == (1, 1)


async def test_a_router_keeps_its_directory_when_the_controller_is_two_releases_newer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with following(Versions(3, 2)) as (_, came):
            await until(lambda: "keeping the last" in caplog.text)
    assert not came
    assert "router-0 supports versions 1 to 1, the controller 2 to 3: update router-0 first" in caplog.text


def test_the_hellos_are_read_by_their_first_field_numbers() -> None:
    """0.1.0 wrote these bytes."""
    assert worker_pb2.RouterHello.FromString(b"\x0a\x01a\x10\x03").protocol == 3
    assert worker_pb2.WorkerHello.FromString(b"\x0a\x01w\x10\x07\x18\x03").protocol == 3
