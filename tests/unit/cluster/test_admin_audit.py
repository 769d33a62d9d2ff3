"""Calls that change the cluster leave a line of the audit log: who, what, when and the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from cluster import certificates
from cluster.certificates import folder_spec
from cluster.control.admin_service import ADMINS, ALLOWED, SERVICE, AdminService
from tandem.config.auth import AuthSpec
from tandem.errors import ConfigError
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, add_port, make_server, open_channel
from tandem.rpc.identity import Identity
from tandem.telemetry.audit import AuditLog
from tandem.testing.disks import SmallDisk
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

CLUSTER = "tandem"
READING = {f"/{SERVICE}/{name}" for name in ("GetTrace", "ListTraces", "ListSnapshots", "RecordRequests", "GetRestart")}
Stub = cluster_pb2_grpc.ClusterStub
Serve = Callable[..., Awaitable[AdminService]]


class Scaler:
    def __init__(self) -> None:
        self.calls: list[object] = []
        self.hangs = asyncio.Event()

    async def scale(self, model: str, prefill: int | None, decode: int | None) -> tuple[str, ...]:
        self.calls.append((model, prefill, decode))
        if decode == 0:
            raise ConfigError("decode: expected at least 1", field="decode")
        return ("decode-0: role becomes prefill", "start decode-1")

    async def drain(self, worker_id: str, **how: object) -> None:
        self.calls.append((worker_id, how))
        if worker_id == "hangs":
            self.hangs.set()
            await asyncio.Event().wait()


class Restart:
    async def begin(self, model: str, *, move: bool, routers: bool) -> None:
        if model == "unknown":
            raise ConfigError("model: unknown")

    def status(self) -> cluster_pb2.RollingRestart:
        return cluster_pb2.RollingRestart()


class Applier:
    async def apply(self, text: str, *, dry_run: bool) -> tuple[str, ...]:
        return ("tiny: 1 prefill and 2 decode workers",)


class Admin:
    """An admin port and its audit log."""

    def __init__(self, path: Path, tls: ClusterTls | None = None, **audit: object) -> None:
        self.path = path
        self.scaler = Scaler()
        self.stop = asyncio.Event()
        self.tls = tls
        self._auth = AuthSpec.model_validate({"audit_log": str(path), **audit})

    async def start(self) -> None:
        parts: dict[str, Any] = {name: cast(Any, SimpleNamespace()) for name in ("workers", "routers", "status")}
        parts |= {"scaler": self.scaler, "applier": Applier(), "restart": Restart()}
        service = AdminService(stop_requested=self.stop, **parts)
        self.audit = service.audit = AuditLog.of(self._auth, "controller")
        self.server = make_server(self.tls, ALLOWED, SERVER_OPTIONS, service.refused)
        service.add_to(self.server)
        port = add_port(self.server, "127.0.0.1:0", self.tls)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def close(self) -> None:
        await self.server.stop(None)
        assert self.audit is not None
        await asyncio.to_thread(self.audit.close)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines() if "method" in line]

    async def logged(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(self.lines()) < count:
                await asyncio.sleep(0.01)
        return self.lines()


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[Admin], Awaitable[Admin]]]:
    started: list[Admin] = []

    async def start(admin: Admin) -> Admin:
        await admin.start()
        started.append(admin)
        return admin

    yield start
    for admin in started:
        await admin.close()


Open = Callable[[Admin], Awaitable[Admin]]


async def test_each_change_has_a_line(tmp_path: Path, opened: Open) -> None:
    admin = await opened(Admin(tmp_path / "audit.jsonl"))
    async with grpc.aio.insecure_channel(admin.address) as channel:
        stub = Stub(channel)
        await stub.Scale(cluster_pb2.ScaleRequest(model="tiny", prefill=2))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Scale(cluster_pb2.ScaleRequest(model="tiny", decode=0))
        await stub.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="decode-0", restart=True))
        await stub.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="decode-0"))
        await stub.RestartWorkers(cluster_pb2.RestartWorkersRequest(model="tiny", wait_for_ends=True))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.RestartWorkers(cluster_pb2.RestartWorkersRequest(model="unknown"))
        await stub.Apply(cluster_pb2.ApplyRequest(spec="redis: {url: secret}", dry_run=True))
        hanging = stub.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="hangs"))
        async with asyncio.timeout(60):
            await admin.scaler.hangs.wait()
        hanging.cancel()
        await admin.logged(8)
        await stub.Shutdown(cluster_pb2.ShutdownRequest())
    found = await admin.logged(9)
    shown = [
        (line["method"].removeprefix("/tandem.v1.Cluster/"), line["details"], line["outcome"], line["code"])
        for line in found
    ]
    assert shown == [
        ("Scale", "prefill 2, decode as is; decode-0: role becomes prefill; start decode-1", "ok", None),
        ("Scale", "prefill as is, decode 0", "rejected", "config"),
        ("DrainWorker", "decode-0; restart", "ok", None),
        ("DrainWorker", "decode-0; remove", "ok", None),
        ("RestartWorkers", "wait for ends", "ok", None),
        ("RestartWorkers", "", "rejected", "config"),
        ("Apply", "dry run; tiny: 1 prefill and 2 decode workers", "ok", None),
        ("DrainWorker", "hangs; remove", "cancelled", "cancelled"),
        ("Shutdown", "", "ok", None),
    ]
    assert admin.stop.is_set()
    changing = {name for name, callers in ALLOWED.items() if callers == ADMINS} - READING
    assert {line["method"] for line in found} == changing, "each method that changes the cluster"
    assert {(line["key_id"], line["source"]) for line in found} == {("local", "127.0.0.1")}
    assert found[0]["model"] == "tiny"
    assert all(line["time"] and line["duration_s"] >= 0 for line in found)
    assert "secret" not in admin.path.read_text(), "a spec may contain passwords"


async def test_the_line_names_the_certificate_also_of_one_that_is_refused(tmp_path: Path, opened: Open) -> None:
    folder = tmp_path / "certs"
    certificates.create(folder, CLUSTER, [], days=9, authority_days=90)
    files = folder_spec(folder)
    admin = await opened(Admin(tmp_path / "audit.jsonl", ClusterTls(CLUSTER, Identity.CONTROLLER, files)))
    for own, is_allowed in ((Identity.ADMIN, True), (Identity.WORKER, False)):
        channel = open_channel(admin.address, ClusterTls(CLUSTER, own, of(folder, own)), Identity.CONTROLLER)
        async with channel:
            refusal = nullcontext() if is_allowed else pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED")
            with refusal:
                await Stub(channel).Scale(cluster_pb2.ScaleRequest(model="tiny", prefill=1))
    found = await admin.logged(2)
    assert [(line["key_id"], line["method"], line["outcome"], line["code"]) for line in found] == [
        (f"spiffe://tandem/{CLUSTER}/admin", "/tandem.v1.Cluster/Scale", "ok", None),
        (f"spiffe://tandem/{CLUSTER}/worker", "/tandem.v1.Cluster/Scale", "rejected", "permission_denied"),
    ]
    assert len(admin.scaler.calls) == 1


async def scale_on(stub: Any) -> None:
    """Until it is refused: the rest of the file's last page takes a few lines."""
    async with asyncio.timeout(120):
        while True:
            await stub.Scale(cluster_pb2.ScaleRequest(model="tiny", prefill=1))


def of(folder: Path, own: Identity) -> Any:
    """The files of `tandem certs`, whose paths name the role."""
    return folder_spec(folder).of(own)


@pytest.mark.acceptance(24, here="the audit log's disk, an operator's change")
async def test_no_change_is_made_that_a_lossless_log_could_not_record(disk: SmallDisk, opened: Open) -> None:
    admin = await opened(Admin(disk.path / "audit.jsonl", audit_lossless=True))
    async with grpc.aio.insecure_channel(admin.address) as channel:
        stub = Stub(channel)
        await stub.Scale(cluster_pb2.ScaleRequest(model="tiny", prefill=1))
        assert len(admin.lines()) == 1, "before the answer"
        disk.fill()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scale_on(stub)
        made = len(admin.scaler.calls)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the audit log cannot be written" in str(refused.value.details())
        disk.free()
        await admin.logged(made)
        async with asyncio.timeout(60):
            while True:
                try:
                    await stub.Scale(cluster_pb2.ScaleRequest(model="tiny", prefill=1))
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
    assert len(admin.lines()) == made + 1 == len(admin.scaler.calls)
