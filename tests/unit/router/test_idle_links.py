"""Links on which nothing happens."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from router.workers.link import WorkerLink
from tandem.config.model import Role
from tandem.rpc.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.v1 import cluster_pb2
from tandem.v1.cluster_pb2_grpc import ClusterStub


class Listener:
    def __init__(self) -> None:
        self.changes = 0

    def link_changed(self, link: WorkerLink) -> None:
        self.changes += 1

    def load_changed(self, link: WorkerLink) -> None: ...

    def work_began(self, link: WorkerLink) -> None: ...


def test_servers_bear_the_pings_of_our_clients() -> None:
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]


@pytest.mark.soak_only  # three pings that come too soon end a connection: half a minute
async def test_a_link_and_a_directory_stream_outlive_a_minute_of_silence() -> None:
    worker, controller, listener = StubWorker("w", Role.DECODE, "tiny"), StubController(), Listener()
    await worker.start()
    await controller.start()
    link = WorkerLink(worker.info(), "router-0", listener)
    link.start()
    await until(lambda: link.ready)
    async with grpc.aio.insecure_channel(controller.address, options=CLIENT_OPTIONS) as channel:
        stream = ClusterStub(channel).WatchDirectory(cluster_pb2.WatchDirectoryRequest(watcher="w"))
        assert isinstance(await stream.read(), cluster_pb2.Directory)
        await asyncio.sleep(60.0)
        assert not stream.done()
        stream.cancel()
    assert listener.changes == 1
    link.cancel("x")
    await until(lambda: "x" in worker.cancelled)
    await link.close()
    await worker.kill()
    await controller.stop()
