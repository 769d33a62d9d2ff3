"""Routers that the cluster did not start: they join it, serve, outlive its controller, and leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.certificates import create, folder_spec
from cluster.spec.resolve import free_ports
from tandem.rpc.versions import CONTROL_VERSIONS
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.e2e.conftest import Cluster
from tests.e2e.test_takeover import kill_the_controller, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VOCAB = 300
POOLS = {"prefill": {"workers": 1}, "decode": {"workers": 1}, "engine": {"kv_blocks": 200}}


class JoinedRouter:
    def __init__(self, cluster: Cluster, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self.ends_with = 0
        self.http, self.grpc, self.control = free_ports(*3 * ["127.0.0.1"])
        self.log = folder / f"{name}.log"
        ports = ("--http-port", self.http, "--grpc-port", self.grpc, "--control-port", self.control)
        command = [sys.executable, "-m", "router", "--join", f"127.0.0.1:{cluster.admin_port}", "--name", name]
        env = os.environ | {"XDG_CACHE_HOME": str(folder / f"{name}-cache")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *map(str, ports), *arguments], env=env, stdout=log, stderr=log)

    async def wait_ready(self) -> None:
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    if (await client.get(f"http://127.0.0.1:{self.http}/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)

    async def tokens(self, seed: int, tokens: int = 8, begun: asyncio.Semaphore | None = None) -> str:
        """`begun` is released at the first token."""
        body = {
            "model": "tiny",
            "prompt": random_prompt(40, VOCAB, seed),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        parts: list[str] = []
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http}", timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "".join(parts)
                if line:
                    parts += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
                    if begun is not None:
                        begun.release()
                        begun = None
        raise AssertionError(f"the answer ended after {''.join(parts)!r}")

    async def begin(self, tokens: int) -> list[asyncio.Task[str]]:
        """Four answers that run."""
        begun = asyncio.Semaphore(0)
        answers = [asyncio.create_task(self.tokens(seed, tokens, begun)) for seed in range(4)]
        for _ in answers:
            await begun.acquire()
        return answers


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., JoinedRouter]]:
    started: list[JoinedRouter] = []

    def start(cluster: Cluster, *arguments: str) -> JoinedRouter:
        started.append(JoinedRouter(cluster, tmp_path, f"edge-{len(started)}", *arguments))
        return started[-1]

    yield start
    for router in started:
        router.process.terminate()
    for router in started:
        assert router.process.wait(30) == router.ends_with, router.log.read_text()


def states(cluster: Cluster) -> dict[str, str]:
    return {router["id"]: router["state"] for router in cluster.status()["routers"]}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "mtls"])
async def test_joined_routers_serve_outlive_the_controller_and_leave(
    cluster_with: Callable[..., Cluster], join: Callable[..., JoinedRouter], tmp_path: Path, secure: bool
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    spec = {
        "models": [{"source": str(model), **POOLS}],
        "control": {"backend": "subprocess"},
        "router": {"replicas": 0, "drain_timeout_s": 60.0},
    }
    options: tuple[str, ...] = ()
    if secure:
        create(tmp_path / "certificates", "tandem", [], days=1, authority_days=2)
        tls = folder_spec(tmp_path / "certificates")
        spec["security"] = {"tls": tls.model_dump()}
        options = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca)
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    assert cluster.status()["routers"] == []
    refused = await asyncio.to_thread(cluster.tandem, "chat", "hello")
    assert "has no router that is ready: start one with `python -m router --join" in refused.stderr
    refused = await asyncio.to_thread(cluster.tandem, "trace")
    assert "no router is in the cluster" in refused.stderr
    first, second = join(cluster, *options), join(cluster, *options)
    await asyncio.gather(first.wait_ready(), second.wait_ready())
    assert states(cluster) == {"edge-0": "ready", "edge-1": "ready"}
    expected = [await first.tokens(seed) for seed in range(4)]
    assert [await second.tokens(seed) for seed in range(4)] == expected
    traces = json.loads((await asyncio.to_thread(cluster.tandem, "trace", "--json")).stdout)
    assert len(traces) == 8, "the controller asks each of them"
    answered = await asyncio.to_thread(cluster.tandem, "chat", "--raw", "--max-tokens", "3", "hello")
    assert answered.returncode == 0, answered.stderr
    assert "edge-0 ready, joined" in (await asyncio.to_thread(cluster.tandem, "status")).stdout

    before = running(cluster)
    answers = await first.begin(400)
    await kill_the_controller(cluster)
    long = await asyncio.gather(*answers)
    assert [await second.tokens(seed) for seed in range(4)] == expected
    async with asyncio.timeout(30):
        while await asyncio.to_thread(states, cluster) != {"edge-0": "ready", "edge-1": "ready"}:
            await asyncio.sleep(0.2)
    assert running(cluster)["workers"] == before["workers"]
    assert "starting again" not in first.log.read_text() + second.log.read_text(), "it has the same secrets"

    answers = await first.begin(400)
    first.process.send_signal(signal.SIGTERM)
    assert await asyncio.gather(*answers) == long, "it drains"
    assert await asyncio.to_thread(first.process.wait, 30) == 0
    async with asyncio.timeout(30):
        while await asyncio.to_thread(states, cluster) != {"edge-1": "ready"}:
            await asyncio.sleep(0.2)
    cluster.assert_conserved()


async def test_a_router_that_may_not_join_says_why(
    cluster_with: Callable[..., Cluster], join: Callable[..., JoinedRouter], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    spec = {"models": [{"source": str(model), **POOLS}], "control": {"backend": "subprocess"}}
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    named_like_its_own = join(cluster, "--name", "router-0")
    async with asyncio.timeout(30):
        while "of routers that the cluster starts" not in named_like_its_own.log.read_text():
            await asyncio.sleep(0.1)
    exposed = JoinedRouter(cluster, tmp_path, "exposed", "--host", "0.0.0.0")
    assert await asyncio.to_thread(exposed.process.wait, 30) == 2
    assert "--host: 0.0.0.0 is not loopback, and callers are not authenticated" in exposed.log.read_text()
    elsewhere = join(cluster, "--cluster", "another")
    async with asyncio.timeout(30):
        while "cluster: this is tandem, and the router is for 'another'" not in elsewhere.log.read_text():
            await asyncio.sleep(0.1)
    unnamed = JoinedRouter(cluster, tmp_path, "unnamed", "--name", "../x")
    assert await asyncio.to_thread(unnamed.process.wait, 30) == 2
    assert "--name: expected letters" in unnamed.log.read_text()
    nowhere = JoinedRouter(cluster, tmp_path, "nowhere", "--join", "controller")
    assert await asyncio.to_thread(nowhere.process.wait, 30) == 2
    assert "expected HOST:PORT, such as 10.0.0.5:50052, got 'controller'" in nowhere.log.read_text()


async def test_a_router_that_was_away_during_a_change_gets_its_settings_when_it_is_back(
    cluster_with: Callable[..., Cluster], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    spec = {"models": [{"source": str(model), **POOLS}], "control": {"backend": "subprocess"}}
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    request = cluster_pb2.JoinRouterRequest(
        router_id="away",
        cluster="tandem",
        http_address="127.0.0.1:1",
        grpc_address="127.0.0.1:2",
        control_address="127.0.0.1:3",
        settings_id="of an earlier change",
        protocol=CONTROL_VERSIONS.protocol,
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.admin_port}") as channel, asyncio.timeout(30):
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        messages = aiter(stub.JoinRouter(request))
        first, second = await anext(messages), await anext(messages)
    assert (first.settings_id, first.launch) == ("of an earlier change", "")
    assert json.loads(second.launch)["router_id"] == "away"


class Clients:
    """Ask one after another, each time another router that is ready, as the endpoints of a Service would have it."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._ready: list[int] = []
        self.answers: list[int] = []
        self._tasks = [asyncio.create_task(self._watch()), *(asyncio.create_task(self._ask(n)) for n in range(4))]

    async def _watch(self) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                self._ready = [port for port in self._ports if await _is_ready(client, port)]
                await asyncio.sleep(0.2)

    async def _ask(self, number: int) -> None:
        body = {"model": "tiny", "prompt": random_prompt(30, VOCAB, number), "max_tokens": 40, "ignore_eos": True}
        turn = number
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                if not self._ready:
                    await asyncio.sleep(0.1)
                    continue
                turn += 1
                url = f"http://127.0.0.1:{self._ready[turn % len(self._ready)]}/v1/completions"
                self.answers.append((await client.post(url, json=body)).status_code)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def _is_ready(client: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "own"])
async def test_changed_settings_of_routers_are_applied_one_after_another(
    cluster_with: Callable[..., Cluster], join: Callable[..., JoinedRouter], tmp_path: Path, joined: bool
) -> None:
    """No request fails; no worker restarts; what was changed holds, also for a router that joins later."""
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    spec: dict[str, Any] = {
        "models": [{"source": str(model), **POOLS}],
        "control": {"backend": "subprocess"},
        "router": {"replicas": 0 if joined else 2, "drain_timeout_s": 20.0},
    }
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    if joined:
        routers = [join(cluster, "--leave-seconds", "5") for _ in range(2)]
        await asyncio.gather(*(router.wait_ready() for router in routers))
        ports = [router.http for router in routers]
        clients = Clients(ports)
    else:
        ports = [int(each["http"].rpartition(":")[2]) for each in cluster.status()["routers"]]
    workers = running(cluster)["workers"]
    changed = tmp_path / "changed.yaml"
    text = (cluster.log.parent / "cluster.yaml").read_text()
    changed.write_text(text.replace("router:", "router:\n  max_body_bytes: 2048"))
    done = await asyncio.to_thread(cluster.tandem, "apply", str(changed))
    assert done.returncode == 0, done.stderr
    assert "routers, one after another: max_body_bytes" in done.stdout
    if joined:
        await clients.close()
        assert set(clients.answers) == {200}
        assert len(clients.answers) > 20
        assert all("starting again" in router.log.read_text() for router in routers)
        late = join(cluster)
        await late.wait_ready()
        ports.append(late.http)
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "tiny", "prompt": "x" * 3000}
        found = [await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body) for port in ports]
    assert [each.status_code for each in found] == [413] * len(ports)
    if not joined:
        changed.write_text(changed.read_text().replace("max_body_bytes: 2048", "record: /proc/nowhere"))
        refused = await asyncio.to_thread(cluster.tandem, "apply", str(changed))
        assert refused.returncode != 0
        assert "router-0 ends whenever it is started" in refused.stderr
        assert "the routers have their earlier settings again" in " ".join(refused.stderr.split())
        async with httpx.AsyncClient(timeout=60) as client:
            found = [await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body) for port in ports]
        assert [each.status_code for each in found] == [413] * len(ports)
    assert running(cluster)["workers"] == workers
    assert set(states(cluster).values()) == {"ready"}
    cluster.note_descendants()
    cluster.assert_conserved()


@pytest.mark.parametrize("works", [True, False], ids=["good settings", "bad settings"])
async def test_a_controller_that_dies_in_a_change_changes_no_two_joined_routers_at_once(
    cluster_with: Callable[..., Cluster], join: Callable[..., JoinedRouter], tmp_path: Path, works: bool
) -> None:
    """The next one finishes it, or sets it back if a router cannot serve with the settings."""
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    spec: dict[str, Any] = {
        "models": [{"source": str(model), **POOLS}],
        "control": {"backend": "subprocess"},
        "router": {"replicas": 0},
    }
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    own = [join(cluster, "--leave-seconds", "1") for _ in range(3)]
    await asyncio.gather(*(router.wait_ready() for router in own))
    changed = tmp_path / "changed.yaml"
    text = (cluster.log.parent / "cluster.yaml").read_text()
    setting = "max_body_bytes: 2048" if works else "record: /proc/nowhere"
    changed.write_text(text.replace("router:", f"router:\n  {setting}"))
    applying = asyncio.create_task(asyncio.to_thread(cluster.tandem, "apply", str(changed)))
    least = 3

    async def count_ready() -> None:
        nonlocal least
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                ready = [await _is_ready(client, router.http) for router in own]
                least = min(least, sum(ready))
                await asyncio.sleep(0.05)

    counting = asyncio.create_task(count_ready())
    async with asyncio.timeout(30):
        while least == 3:
            await asyncio.sleep(0.02)
    await kill_the_controller(cluster)
    assert (await applying).returncode != 0
    body = {"model": "tiny", "prompt": "x" * 3000}
    async with asyncio.timeout(90), httpx.AsyncClient() as client:
        if works:
            while [await _status(client, router.http, body) for router in own] != [413] * 3:
                await asyncio.sleep(0.2)
        else:
            while "was not completed" not in cluster.log.read_text():
                await asyncio.sleep(0.2)
    counting.cancel()
    assert least == 2
    again = await asyncio.to_thread(
        cluster.tandem, "apply", str(changed if works else cluster.log.parent / "cluster.yaml")
    )
    assert "nothing to do" in again.stdout, again.stderr
    ended = [router.process.poll() for router in own]
    for router, code in zip(own, ended, strict=True):
        router.ends_with = code or 0
    assert sorted(map(str, ended)) == (["None"] * 3 if works else ["2", "None", "None"])


async def _status(client: httpx.AsyncClient, port: int, body: dict[str, Any]) -> int:
    try:
        return (await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)).status_code
    except httpx.HTTPError:
        return 0
