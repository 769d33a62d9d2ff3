"""The controller dies, or all of `tandem up`, or Ray: what runs goes on, and the next controller takes it over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest

from cluster.cli.admin_client import Admin
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.testing.processes import has_ended
from tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.e2e.conftest import Cluster, RayNodes, start_cluster
from tests.e2e.test_faults import GREEDY, SEEDED, ask

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VOCAB = 300


def start(cluster: Cluster, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cluster", *arguments]
    with cluster.log.open("ab") as log:
        return subprocess.Popen(command, env=cluster.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def process_of(cluster: Cluster, words: str) -> psutil.Process:
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    return next(each for each in family if words in " ".join(each.cmdline()))


def has_grpc(process: psutil.Process) -> bool:
    return any("cygrpc" in each.path for each in process.memory_maps())


async def kill_the_controller(cluster: Cluster) -> None:
    """Returns when another one answers."""
    before = process_of(cluster, "cluster.control")
    before.kill()
    async with asyncio.timeout(180):
        while True:
            await asyncio.sleep(0.1)
            if (await asyncio.to_thread(cluster.tandem, "status", "--json")).returncode == 0:
                break
    assert process_of(cluster, "cluster.control").pid != before.pid


def running(cluster: Cluster) -> dict[str, Any]:
    """What a takeover must leave as it was."""
    status = cluster.status()
    workers = {
        each["id"]: (each["epoch"], each["restarts"], {p["name"]: p["pid"] for p in each["processes"]})
        for each in status["workers"]
    }
    routers = [{key: value for key, value in each.items() if key != "state"} for each in status["routers"]]
    return {"workers": workers, "routers": routers, "processes": status["processes"]}  # a busy one may be late


async def test_a_killed_controller_costs_no_answer_and_the_next_takes_over_every_process(cluster: Cluster) -> None:
    asks = [(f"{number}: {'A lighthouse keeper wrote down every ship. ' * 8}", number % 2) for number in range(8)]
    before = running(cluster)
    assert has_grpc(process_of(cluster, "cluster.control"))
    assert not has_grpc(psutil.Process(cluster.process.pid)), "the keeper is small"
    async with cluster.async_client(timeout=120.0) as client:
        begun = asyncio.Event()
        answers = [
            asyncio.create_task(ask(client, prompt, 48, SEEDED if is_seeded else GREEDY, begun))
            for prompt, is_seeded in asks
        ]
        await begun.wait()
        await kill_the_controller(cluster)
        found = await asyncio.gather(*answers)
        again = [ask(client, prompt, 48, SEEDED if is_seeded else GREEDY) for prompt, is_seeded in asks]
        assert found == await asyncio.gather(*again)
    assert running(cluster) == before
    decode = cluster.worker("decode")
    os.kill(next(each["pid"] for each in decode["processes"] if each["name"] == "rank-0"), signal.SIGKILL)
    async with asyncio.timeout(120):  # the next one watches what it took over
        while cluster.worker("decode")["epoch"] == decode["epoch"]:
            await asyncio.sleep(0.2)
    await asyncio.to_thread(cluster.wait_ready)
    cluster.note_descendants()
    cluster.assert_conserved()


@pytest.mark.parametrize("backend", ["subprocess", pytest.param("ray", marks=pytest.mark.soak_only)])
async def test_a_drain_under_way_is_continued_and_a_changed_spec_remembered(
    cluster_with: Callable[..., Cluster], tmp_path: Path, backend: str
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, max_positions=8192)
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 1}, "engine": {"kv_blocks": 4000}}
    spec = {"models": [{"source": str(model), **pools}], "control": {"backend": backend}}
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    assert (await asyncio.to_thread(cluster.tandem, "scale", "--decode", "2")).returncode == 0
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=300.0) as client:
        body = {"model": "tiny", "max_tokens": 6000, "ignore_eos": True}  # under way until the controller is killed
        bodies = [body | {"prompt": random_prompt(20, VOCAB, number)} for number in range(8)]
        answers = [asyncio.create_task(client.post("/v1/completions", json=each)) for each in bodies]
        async with Admin(f"127.0.0.1:{cluster.admin_port}").channel() as channel:
            stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
            async with asyncio.timeout(60):
                while not await _computes(stub, "decode-1"):
                    await asyncio.sleep(0.02)
            drain = cluster_pb2.DrainWorkerRequest(worker_id="decode-1", wait_for_ends=True)
            draining = asyncio.create_task(_asked(stub, drain))
            async with asyncio.timeout(60):
                while "draining" not in await _states(stub):
                    await asyncio.sleep(0.02)
            await kill_the_controller(cluster)
            with pytest.raises(grpc.aio.AioRpcError):
                await draining
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        async with asyncio.timeout(180):
            while {each["id"] for each in cluster.status()["workers"]} != {"decode-0"}:
                await asyncio.sleep(0.1)
    cluster.assert_conserved()


@pytest.mark.parametrize("backend", ["subprocess", pytest.param("ray", marks=pytest.mark.soak_only)])
async def test_a_restart_of_all_workers_is_completed_by_the_next_controller(
    cluster_with: Callable[..., Cluster], tmp_path: Path, backend: str
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 3}, "engine": {"kv_blocks": 400}}
    spec = {"models": [{"source": str(model), **pools}], "control": {"backend": backend}}
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    before = {each["id"]: each["epoch"] for each in cluster.status()["workers"]}
    answers: list[httpx.Response] = []
    ends = asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120.0) as client:

        async def load(seed: int) -> None:
            prompt = random_prompt(20, VOCAB, seed)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
            while not ends.is_set():
                answers.append(await client.post("/v1/completions", json=body))

        loads = [asyncio.create_task(load(seed)) for seed in range(2)]
        watching = asyncio.create_task(asyncio.to_thread(cluster.tandem, "restart"))
        async with Admin(f"127.0.0.1:{cluster.admin_port}").channel() as channel:
            stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
            async with asyncio.timeout(60):
                while not (await stub.GetRestart(cluster_pb2.GetRestartRequest())).restarted:
                    await asyncio.sleep(0.05)
        refused = await asyncio.to_thread(cluster.tandem, "restart")
        await kill_the_controller(cluster)
        told = await watching
        ends.set()
        await asyncio.gather(*loads)
    assert refused.returncode == 2
    assert "a restart of 3 workers is under way" in refused.stderr
    assert (told.returncode, told.stdout.splitlines()) == (0, [f"{name} is ready again" for name in sorted(before)])
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == len(loads), "another answer"
    after = cluster.status()["workers"]
    assert {each["id"]: each["restarts"] for each in after} == dict.fromkeys(before, 1)
    assert all(each["epoch"] != before[each["id"]] for each in after)
    cluster.note_descendants()
    cluster.assert_conserved()


async def _asked(stub: cluster_pb2_grpc.ClusterAsyncStub, drain: cluster_pb2.DrainWorkerRequest) -> None:
    await stub.DrainWorker(drain)


async def _computes(stub: cluster_pb2_grpc.ClusterAsyncStub, worker_id: str) -> bool:
    workers = (await stub.GetStatus(cluster_pb2.GetStatusRequest())).workers
    return any(each.info.worker_id == worker_id and each.live.load.running_requests for each in workers)


async def _states(stub: cluster_pb2_grpc.ClusterAsyncStub) -> set[str]:
    return {each.state for each in (await stub.GetStatus(cluster_pb2.GetStatusRequest())).workers}


async def test_workers_outlive_a_killed_tandem_up_on_a_ray_cluster_of_its_own(nodes: RayNodes, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    nodes.add()
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 1}, "engine": {"kv_blocks": 200}}
    spec = {"models": [{"source": str(model), **pools}], "control": {"ray_address": nodes.address}}
    first = await asyncio.to_thread(start_cluster, tmp_path, spec=spec)
    before = running(first)
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=first.base_url, timeout=120.0) as client:
        answering = asyncio.create_task(lines_of(client, 1, 1900, begun))
        await begun.wait()
        first.process.kill()
        first.process.wait(10)
        assert (await answering)[-1] == "data: [DONE]"
        assert (await lines_of(client, 1, 400, begun))[-1] == "data: [DONE]"  # nothing controls it now
    process = await asyncio.to_thread(start, first, "up", "--config", str(tmp_path / "cluster.yaml"))
    second = Cluster(process, first.env, first.http_port, first.grpc_port, first.admin_port, first.log)
    try:
        await asyncio.to_thread(second.wait_ready)
        after = running(second)
        assert after["workers"] == before["workers"]
        assert after["routers"] == before["routers"]
        with pytest.raises(RuntimeError, match="another `tandem up` runs a cluster named"):
            await asyncio.to_thread(start_cluster, _empty(tmp_path / "third"), spec=spec)
        elsewhere = second.env | {"XDG_STATE_HOME": str(tmp_path / "third" / "state")}
        other = Cluster(process, elsewhere, second.http_port, second.grpc_port, second.admin_port, second.log)
        impatient = await asyncio.to_thread(start, other, "up", "--config", str(tmp_path / "third" / "cluster.yaml"))
        await asyncio.sleep(8.0)  # it waits for the lease
        impatient.send_signal(signal.SIGINT)
        await asyncio.to_thread(impatient.wait, 120)
        await asyncio.to_thread(second.wait_ready)  # its folders were left alone
        assert running(second)["routers"] == before["routers"]
        second.assert_conserved()
    finally:
        second.process.kill()
        second.process.wait(10)
    config = tmp_path / "cluster.yaml"
    await asyncio.to_thread(config.write_text, f"{config.read_text()}\ntransfer: {{digests: false}}\n")
    process = await asyncio.to_thread(start, first, "up", "--config", str(config))
    third = Cluster(process, first.env, first.http_port, first.grpc_port, first.admin_port, first.log)
    try:
        await asyncio.to_thread(third.wait_ready)
        assert not [each for each in pids_of(before) if psutil.pid_exists(each)], "it was asked for another cluster"
        third.note_descendants()
        ours = pids_of(running(third))
    finally:
        assert third.stop() == 0
    deadline_s = time.monotonic() + 60.0
    while alive := [each for each in ours if psutil.pid_exists(each)]:
        assert time.monotonic() < deadline_s, alive
        await asyncio.sleep(0.1)


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def pids_of(seen: dict[str, Any]) -> list[int]:
    return [pid for _, _, processes in seen["workers"].values() for pid in processes.values()]


@pytest.mark.parametrize("part", ["raylet/raylet", pytest.param("gcs_server", marks=pytest.mark.soak_only)])
@pytest.mark.acceptance(7, here="raylet; running requests fail", soak="GCS too")
async def test_a_lost_ray_is_named_and_everything_on_it_started_again(
    cluster_with: Callable[..., Cluster], tmp_path: Path, part: str
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 1}, "engine": {"kv_blocks": 200}}
    cluster = await asyncio.to_thread(cluster_with, spec={"models": [{"source": str(model), **pools}]})
    before = running(cluster)
    on_ray = list(map(psutil.Process, pids_of(before)))
    process_of(cluster, part).kill()
    name = Path(part).name
    async with asyncio.timeout(60):
        while f"Ray's {name}" not in cluster.log.read_text():
            await asyncio.sleep(0.1)
    _, alive = await asyncio.to_thread(psutil.wait_procs, on_ray, 60)
    assert not alive, "an orphan would go on serving"
    await asyncio.to_thread(cluster.wait_ready)
    after = running(cluster)
    assert after["workers"].keys() == before["workers"].keys()
    cluster.note_descendants()
    cluster.assert_conserved()


def gcs_of(nodes: RayNodes) -> psutil.Process:
    family = [each for node in nodes.processes for each in psutil.Process(node.pid).children(recursive=True)]
    return next(each for each in family if each.name() == "gcs_server")


async def lines_of(client: httpx.AsyncClient, seed: int, tokens: int, begun: asyncio.Event) -> list[str]:
    """Of a stream of events. Raises an httpx error if it is broken off."""
    prompt = random_prompt(20, VOCAB, seed)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    found = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            found += [line] if line else []
            if len(found) > 1:
                begun.set()
    return found


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.soak_only)])
async def test_a_lost_ray_cluster_of_its_own_lets_running_streams_end(
    nodes: RayNodes, tmp_path: Path, to_the_end: bool
) -> None:
    """Its GCS dies, and with it the head's node: routers and one of two workers."""
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, max_positions=16_384)
    nodes.add()
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 2}, "engine": {"kv_blocks": 4000}}
    control = {"ray_address": nodes.address}
    spec = {"models": [{"source": str(model), **pools}], "control": control, "router": {"drain_timeout_s": 1.0}}
    cluster = await asyncio.to_thread(start_cluster, tmp_path, spec=spec)
    routers = [psutil.Process(each["pid"]) for each in cluster.status()["processes"] if each["name"] == "router-0"]
    try:
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120.0) as client:
            tokens = [8] * 4 + [12_000] * 5  # the first end in a second on any machine, the others on none
            begun = [asyncio.Event() for _ in tokens]
            asks = zip(range(len(tokens)), tokens, begun, strict=True)
            streams = [asyncio.create_task(lines_of(client, *each)) for each in asks]
            await asyncio.gather(*(each.wait() for each in begun))
            gcs_of(nodes).kill()
            ends = [stream[-1] for stream in await asyncio.gather(*streams)]
        assert set(ends[:4]) == {"data: [DONE]"}, "they could end"
        assert all('"code":"unavailable"' in each for each in ends[4:]), ends
        assert not (await asyncio.to_thread(psutil.wait_procs, routers, 60))[1], "it was drained"
        if to_the_end:
            assert await asyncio.to_thread(cluster.process.wait, 400) == 4
            assert "the Ray cluster is lost" in await asyncio.to_thread(cluster.log.read_text)
    finally:
        cluster.process.kill()
        cluster.process.wait(10)


async def test_a_gcs_that_is_away_for_a_while_ends_no_controller(nodes: RayNodes, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    nodes.add()
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 1}, "engine": {"kv_blocks": 200}}
    spec = {"models": [{"source": str(model), **pools}], "control": {"ray_address": nodes.address}}
    cluster = await asyncio.to_thread(start_cluster, tmp_path, spec=spec)
    try:
        before, controller = running(cluster), process_of(cluster, "cluster.control")
        gcs = gcs_of(nodes)
        gcs.suspend()
        scaled = await asyncio.to_thread(cluster.tandem, "scale", "--decode", "2")  # asks the GCS for room
        assert (scaled.returncode != 0, "has not answered" in scaled.stderr) == (True, True), scaled.stderr
        await asyncio.sleep(10.0)  # 20 s in all: more than the keeper waits for a controller that is stuck
        assert running(cluster)["routers"] == before["routers"]
        gcs.resume()
        again = await asyncio.to_thread(cluster.tandem, "scale", "--decode", "2")
        assert again.returncode == 0, again.stderr
        after = running(cluster)
        assert after["workers"].keys() == {"decode-0", "decode-1"}
        assert after["workers"]["decode-0"] == before["workers"]["decode-0"]
        assert process_of(cluster, "cluster.control") == controller
        await asyncio.to_thread(cluster.assert_conserved)
    finally:
        assert await asyncio.to_thread(cluster.stop) == 0


async def test_a_controller_that_is_stuck_is_replaced(cluster_with: Callable[..., Cluster], tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    pools = {"prefill": {"workers": 0}, "decode": {"workers": 1}, "engine": {"kv_blocks": 200}}
    spec = {"models": [{"source": str(model), **pools}], "control": {"backend": "subprocess"}}
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    before, stuck = running(cluster), process_of(cluster, "cluster.control")
    stuck.suspend()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60.0) as client:
        async with asyncio.timeout(180):
            while not has_ended(stuck):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                await asyncio.sleep(0.5)
    await asyncio.to_thread(cluster.wait_ready)
    assert running(cluster) == before
    assert "the controller has not answered for 15 s" in cluster.log.read_text()
    cluster.note_descendants()
