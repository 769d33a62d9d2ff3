"""A small cluster under the subprocess backend: epochs, refused registrations, and a close that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from cluster.cli.admin_client import Admin, fetch_status
from cluster.control.controller import Controller
from cluster.control.record import WorkerState
from cluster.control.worker_slot import WorkerSlot
from cluster.keeper.keeper import Keeper
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import resolve, with_free_ports
from cluster.testing.running import controller_of
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.unit.cluster.test_workers import FakeBackend


@pytest.fixture
async def controller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Controller]:
    folder = tmp_path_factory.mktemp("c")
    model = write_tiny_llama(folder / "tiny")
    running = controller_of({"models": [{"source": str(model), "engine": {"kv_blocks": 32}}]}, folder)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        await running.start()
        await running.wait_ready(lambda what: None)
        yield running
    finally:
        await running.close()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert left == set()
    assert not (folder / "run").exists()


async def kill(slot: WorkerSlot, name: str) -> None:
    pid = next(process.pid for process in await slot.processes() if process.name == name)
    os.kill(pid, signal.SIGKILL)


async def test_a_killed_rank_starts_a_new_epoch_and_leaves_other_workers_alone(controller: Controller) -> None:
    decode, prefill = controller.workers.slots["decode-0"], controller.workers.slots["prefill-0"]
    before, other = decode.epoch, prefill.epoch
    await kill(decode, "rank-0")
    async with asyncio.timeout(60):
        while decode.epoch == before or decode.state is not WorkerState.READY:
            await asyncio.sleep(0.05)
        await controller.wait_ready(lambda what: None)
    assert decode.restarts == 1
    assert (prefill.epoch, prefill.restarts) == (other, 0)
    registered = controller.workers.directory.get("decode-0")
    assert registered is not None
    assert registered.epoch == decode.epoch
    places = {
        place.worker_id: (place.ranks, place.restarts) for place in controller.workers.directory.snapshot().places
    }
    assert places == {"decode-0": (1, 1), "prefill-0": (1, 0)}


async def test_registrations_that_do_not_fit_are_refused_with_the_reason(controller: Controller) -> None:
    """Of unknown workers, of other epochs, and of a worker whose cache the others cannot read."""
    slot = controller.workers.slots["decode-0"]
    async with grpc.aio.insecure_channel(controller.admin_address) as channel:
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        for worker_id, epoch in (("nobody", 1), ("decode-0", slot.epoch + 1)):
            assert worker_id in await refusal(stub, cluster_pb2.WorkerInfo(worker_id=worker_id, epoch=epoch))
        directory = await anext(aiter(stub.WatchDirectory(cluster_pb2.WatchDirectoryRequest(watcher="test"))))
        assert {worker.worker_id for worker in directory.workers} == {"decode-0", "prefill-0"}
        info = cluster_pb2.WorkerInfo()
        assert slot.info is not None
        info.CopyFrom(slot.info)
        info.layout.dtype = "bfloat16"
        details = await refusal(stub, info)
    assert "bfloat16" in details
    assert "float32" in details
    assert slot.state is WorkerState.FAILED


async def refusal(stub: cluster_pb2_grpc.ClusterAsyncStub, info: cluster_pb2.WorkerInfo) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Register(cluster_pb2.RegisterRequest(worker=info))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return refused.value.details() or ""


@pytest.mark.slow
async def test_a_worker_that_never_starts_is_given_up_with_its_last_log_line(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("f")
    model = write_tiny_llama(folder / "tiny")
    one = {"source": str(model), "prefill": {"workers": 0}, "engine": {"kv_blocks": 32}}
    running = controller_of({"models": [one], "redis": {"mode": "none"}}, folder)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # truncated after everything was checked
    try:
        await running.start()
        with pytest.raises(TandemError, match=r"decode-0 cannot start.*model\.safetensors"):
            await running.wait_ready(lambda what: None)
    finally:
        await running.close()


async def test_the_next_tandem_up_listens_where_workers_look_for_a_controller(tmp_path: Path) -> None:
    """On a Ray cluster of its own: with `admin_port: 0`, each `tandem up` would choose another port."""
    source = str(write_tiny_llama(tmp_path / "tiny"))
    ports = {"router": {"http_port": 0, "grpc_port": 0}, "control": {"admin_port": 0}, "redis": {"mode": "none"}}
    spec = ClusterSpec.model_validate({"models": [{"source": source}], **ports})
    resolved = resolve(spec, lambda what: None)
    backend, keeper = FakeBackend(), Keeper(tmp_path / "logs")

    async def started(holder: str) -> Controller:
        cluster = with_free_ports(resolved)
        folders = tmp_path / "run", tmp_path / "logs"
        controller = Controller(cluster, backend, keeper, *folders, SpecSource(spec, {}), holder)
        await controller.start()
        return controller

    first = await started("k1")
    async with asyncio.timeout(60):
        while not backend.record:
            await asyncio.sleep(0.01)
    assert first._admin is not None
    await first._admin.stop(0)
    second = await started("k2")
    try:
        assert not second.is_new
        assert second.admin_address == first.admin_address
        assert second.http_address == first.http_address
        assert second._build_record().admin_address == first.admin_address
    finally:
        await second.close()
        await first.close()


async def test_a_size_that_is_asked_for_at_the_start_waits_until_all_workers_are_placed(tmp_path: Path) -> None:
    """Else a worker that still waits for room would be started twice."""
    source = str(write_tiny_llama(tmp_path / "tiny"))
    ports = {"router": {"http_port": 0, "grpc_port": 0}, "control": {"admin_port": 0}, "redis": {"mode": "none"}}
    spec = ClusterSpec.model_validate({"models": [{"source": source}], **ports})
    backend = FakeBackend(slow={"decode-0": asyncio.Event()})
    cluster = with_free_ports(resolve(spec, lambda what: None))
    controller = Controller(cluster, backend, Keeper(tmp_path / "logs"), tmp_path / "run", tmp_path / "logs")

    async def asked() -> tuple[int, int]:
        (model,) = (await fetch_status(Admin(controller.admin_address))).models
        return model.prefill, model.decode

    start = asyncio.create_task(controller.start())
    try:
        async with asyncio.timeout(60):
            while "prefill-0" not in controller.workers.slots:
                await asyncio.sleep(0.01)
            assert await asked() == (1, 1), "as the spec says, placed or not"
            scale = asyncio.create_task(controller.scaler.scale("", 1, 2))
            await asyncio.sleep(0.1)
            assert set(backend.placed) == {"prefill-0"}
            backend.slow["decode-0"].set()
            await start
            while "decode-1" not in controller.workers.slots:
                await asyncio.sleep(0.01)
            assert await asked() == (1, 2)
            scale.cancel()
            await asyncio.gather(scale, return_exceptions=True)
            assert await asked() == (1, 1)
    finally:
        start.cancel()
        await controller.close()
    assert set(backend.placed) == {"prefill-0", "decode-0", "decode-1"}
