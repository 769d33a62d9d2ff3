"""A router with a lossless audit log on a full disk refuses calls, and serves again when there is room."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.testing.stub_worker import until
from tandem.config.auth import AuthSpec
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from tandem.telemetry.audit_chain import verify
from tandem.testing.disks import SmallDisk
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

MODEL = "tiny"


@pytest.fixture
def path(disk: SmallDisk) -> Path:
    return disk.path / "audit.jsonl"


@pytest.fixture
def auth(keys: Keys, path: Path) -> AuthSpec:
    return AuthSpec(keys_file=str(keys.path), audit_log=str(path), audit_lossless=True, audit_chained=True)


@pytest.mark.acceptance(24, here="the audit log's disk, a router that serves")
async def test_no_call_goes_unlogged(cluster: Cluster, keys: Keys, disk: SmallDisk, path: Path) -> None:
    headers, metadata = keys.bearer("acme"), keys.metadata("acme")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    disk.fill()
    answered = 0
    async with asyncio.timeout(60):
        while (answer := await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 200:
            answered += 1
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"
    assert "the audit log cannot be written" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await cluster.http.get("/health")).status_code == 200, "no restart would help"
    disk.free()
    async with asyncio.timeout(60):
        while (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code != 200:
            await asyncio.sleep(0.05)
    await until(lambda: len(requests(path)) == answered + 1)
    assert is_intact(path)


async def test_an_open_stream_answers_no_request_that_would_go_unlogged(
    cluster: Cluster, keys: Keys, disk: SmallDisk, path: Path
) -> None:
    headers = keys.bearer("acme")
    stub: oip_grpc.GRPCInferenceServiceAsyncStub = oip_grpc.GRPCInferenceServiceStub(cluster.channel)
    stream = stub.ModelStreamInfer(metadata=keys.metadata("acme"))
    request = oip.ModelInferRequest(model_name="nope", id="1")
    await stream.write(request)
    assert "inputs: expected" in await message(stream)
    disk.fill()
    async with asyncio.timeout(60):
        while (await cluster.http.get("/v1/models", headers=headers)).status_code == 200:
            pass
    await stream.write(request)
    assert "the audit log cannot be written" in await message(stream)
    disk.free()
    async with asyncio.timeout(60):
        while (await cluster.http.get("/v1/models", headers=headers)).status_code != 200:
            await asyncio.sleep(0.05)
    await stream.done_writing()
    await until(lambda: "ModelStreamInfer" in path.read_text())


async def message(stream: Any) -> str:
    reply = await stream.read()
    assert isinstance(reply, oip.ModelStreamInferResponse)
    return reply.error_message


def is_intact(path: Path) -> bool:
    return verify([("audit", path.read_bytes().splitlines(keepends=True))], None).broken is None


def requests(path: Path) -> list[str]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["request_id"] for line in found if "request_id" in line]
