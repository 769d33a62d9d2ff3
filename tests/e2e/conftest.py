"""A whole cluster as a user starts it: `tandem up`, with Ray, the demo model, the router and the embedded Redis.

One cluster serves all tests of a session; those that kill parts of it leave it whole again. It is found by its own
state folder, so a cluster of the user's is never touched.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from cluster.spec.resolve import free_ports
from tandem.testing.processes import command_lines

READY_TIMEOUT_S = 300.0
RAY_HOST = "127.0.0.2"  # Ray turns 127.0.0.1 into the machine's own address, and would listen to others
ENDS_WITHIN_S = 60.0
RAY = str(Path(sys.executable).with_name("ray"))
GOLDEN_FILE = Path(__file__).parents[1] / "data" / "smollm2_golden.json"


@dataclass
class Golden:
    """One prompt with the tokens any correct engine answers (fp32, greedy)."""

    prompt: str
    text: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    greedy_text: str


@dataclass
class Cluster:
    """A running `tandem up`."""

    process: subprocess.Popen[bytes]
    env: dict[str, str]
    http_port: int
    grpc_port: int
    admin_port: int
    log: Path
    ca: Path | None = None  # of the edge's certificate; None: no TLS
    has_routers: bool = True
    started_in_s: float = 0.0
    descendants: set[psutil.Process] = field(default_factory=set)

    @property
    def base_url(self) -> str:
        return f"{'http' if self.ca is None else 'https'}://127.0.0.1:{self.http_port}"

    @property
    def verify(self) -> ssl.SSLContext | bool:
        return True if self.ca is None else ssl.create_default_context(cafile=str(self.ca))

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key="none", **({"max_retries": 0} | options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", **({"max_retries": 0} | options))

    def tandem(self, *arguments: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cluster", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def status(self) -> dict[str, Any]:
        done = self.tandem("status", "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def worker(self, role: str) -> dict[str, Any]:
        return next(worker for worker in self.status()["workers"] if worker["role"] == role)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until every worker is ready and the router, if it starts one, answers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"tandem up ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                answers = not self.has_routers or self._is_ready()
                if answers and all(worker["state"] == "ready" for worker in self.status()["workers"]):
                    return
            except (httpx.HTTPError, AssertionError):
                pass
            time.sleep(0.3)
        raise RuntimeError(f"not ready within {timeout_s:g} s:\n{self.log.read_text()[-4000:]}")

    def _is_ready(self) -> bool:
        return httpx.get(f"{self.base_url}/ready", timeout=5.0, verify=self.verify).status_code == 200

    def assert_conserved(self, within_s: float = 60.0) -> None:
        """Every worker at rest: nothing leased or in use, every block accounted for."""
        deadline = time.monotonic() + within_s
        while True:
            workers = self.status()["workers"]
            blocks, host = ([worker[key] for worker in workers] for key in ("blocks", "host_blocks"))
            at_rest = all(
                found["free"] + found["cached"] + found["leased"] + found["in_use"] == found["total"]
                and found["leased"] == found["in_use"] == 0
                for found in blocks
            ) and all(found["free"] + found["used"] == found["total"] for found in host)
            if at_rest:
                return
            assert time.monotonic() < deadline, f"blocks leaked or never came to rest: {blocks}"
            time.sleep(0.2)

    def note_descendants(self) -> None:
        self.descendants |= set(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self) -> int:
        if self.process.poll() is not None:
            return self.process.returncode
        self.note_descendants()
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(120.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def survivors(self) -> list[str]:
        """Processes of the cluster that stay alive: Ray's own may end a moment after their parent."""
        deadline = time.monotonic() + 10.0
        while (alive := command_lines(self.descendants)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive


def start_cluster(folder: Path, *arguments: str, spec: dict[str, Any] | None = None, ca: Path | None = None) -> Cluster:
    http_port, grpc_port, admin_port = free_ports(*3 * ["127.0.0.1"])
    config = folder / "cluster.yaml"
    settings: dict[str, Any] = {
        "router": {"http_port": http_port, "grpc_port": grpc_port},
        "control": {"admin_port": admin_port},
    }
    for section, values in (spec or {}).items():
        settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    config.write_text(yaml.safe_dump(settings))
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONUNBUFFERED": "1"}
    log = folder / "up.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "cluster", "up", "--config", str(config), *arguments]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    started_s = time.monotonic()
    cluster = Cluster(process, env, http_port, grpc_port, admin_port, log, ca, settings["router"].get("replicas") != 0)
    try:
        cluster.wait_ready()
    except BaseException:
        cluster.stop()
        raise
    cluster.started_in_s = time.monotonic() - started_s
    cluster.note_descendants()
    return cluster


@pytest.fixture
def cluster_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """`cluster_with("--routers", "2", spec={...})`: a cluster of the test's own, started so and ended after it."""
    started: list[Cluster] = []

    def start(*arguments: str, spec: dict[str, Any] | None = None) -> Cluster:
        started.append(start_cluster(tmp_path_factory.mktemp("cluster"), *arguments, spec=spec))
        return started[-1]

    yield start
    for running in started:
        assert running.stop() == 0, running.log.read_text()[-4000:]
        assert running.survivors() == []


@pytest.fixture(scope="session")
def golden() -> list[Golden]:
    return [Golden(**entry) for entry in json.loads(GOLDEN_FILE.read_text())["prompts"]]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Handoffs are what these tests look at: which requests get one by default, and whether a worker counts as stalled,
    # depends on how fast the machine is now.
    router = {"disaggregation": "always", "worker_stall_s": READY_TIMEOUT_S}
    running = start_cluster(tmp_path_factory.mktemp("cluster"), spec={"router": router})
    yield running
    code = running.stop()
    assert code == 0, running.log.read_text()[-4000:]
    assert running.survivors() == []


class RayNodes:
    """A Ray cluster whose nodes are all on this machine, each with one CPU."""

    def __init__(self, folder: Path) -> None:
        (self._port,) = free_ports(RAY_HOST)
        self._log = folder / "ray.log"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"{RAY_HOST}:{self._port}"
        self._start("--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={folder}")
        try:
            self._wait_healthy()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return self._nodes

    def add(self) -> subprocess.Popen[bytes]:
        return self._start(f"--address={self.address}")

    def close(self) -> None:
        for node in reversed(self._nodes):
            family = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            node.send_signal(signal.SIGINT)  # at once, where SIGTERM drains first
            with suppress(subprocess.TimeoutExpired):
                node.wait(ENDS_WITHIN_S)
            node.kill()
            node.wait()
            for process in psutil.wait_procs(family, timeout=10)[1]:
                process.kill()

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self._run("health-check", "--address", self.address).returncode:
            assert time.monotonic() < deadline, self._log.read_text()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        options = ("--num-cpus=1", "--object-store-memory=83886080", f"--node-ip-address={RAY_HOST}", "--block")
        with self._log.open("ab") as log:
            command = (RAY, "start", *options, *arguments)
            self._nodes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return self._nodes[-1]

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run((RAY, *arguments), capture_output=True, check=False, timeout=180)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))  # short: Ray's unix sockets lie below it
    try:
        with closing(RayNodes(folder)) as running:
            yield running
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
