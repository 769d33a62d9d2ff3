"""The chart's pods, run here as processes: what `helm template` renders for two machines and a Valkey, started as
KubeRay and the kubelet would, each machine a network namespace with a cable between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.backends import embedded_redis
from tandem.checkpoint.cache import cache_dir
from tandem.checkpoint.model_store import pull
from tandem.config.spec import DEMO_MODEL

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

ROOT = Path(__file__).resolve().parents[2]
EVERY = bool(os.environ.get("TANDEM_SOAK"))
HEAD_IP, VALKEY_IP = "10.77.0.1", "10.77.0.3"
ROUTER_IPS = ("10.77.0.4", "10.77.0.5", "10.77.0.6")
NODE_IPS = ("10.77.0.2", "10.77.0.7", "10.77.0.8")
NODE_IP = NODE_IPS[0]
MOST_RESTARTS = 3  # of one pod
SERVICE_NAMES = {
    "test-tandem-head-svc.serving.svc.cluster.local": HEAD_IP,
    "test-tandem-control.serving.svc": HEAD_IP,
    "test-tandem-valkey": VALKEY_IP,
}
VALUES: dict[str, Any] = {
    "cluster": {
        "models": [{"source": "smollm2-135m", "prefill": {"workers": 1}, "decode": {"workers": 1}}],
        "router": {"replicas": 2, "disaggregation": "always"},
        "security": {"allow_plaintext": True},
    },
    # A CPU for each worker: the two cannot share a machine.
    "node": {"replicas": 1, "resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}},
    "preStopSeconds": 1,
    "redis": {"mode": "valkey", "valkey": {"auth": {"existingSecret": "tandem-valkey"}}},
}

ROUTER_PODS: dict[str, Any] = {
    "cluster": VALUES["cluster"] | {"router": {"disaggregation": "always", "drain_timeout_s": 90}},
    "terminationGracePeriodSeconds": 120,
    "routers": {"replicas": 2},
    "node": VALUES["node"] | {"onHead": False, "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}}},
    "preStopSeconds": 1,
    "redis": VALUES["redis"],
    "ray": {"gcsFaultTolerance": {"enabled": True, "existingSecret": "tandem-ray"}},
}

# A CPU for each of three workers, so that a node that ends leaves a decode worker.
ROLLING = ROUTER_PODS | {
    "cluster": ROUTER_PODS["cluster"]
    | {"models": [{"source": "smollm2-135m", "prefill": {"workers": 1}, "decode": {"workers": 2}}]},
    "node": {"onHead": False, "replicas": 3, "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}}},
    "upgrade": {"strategy": "rolling"},
}

# Each role has machines of its own, with a CPU for one worker.
GROUPS = ROUTER_PODS | {
    "node": {"onHead": False, "resources": ROLLING["node"]["resources"]},
    "nodeGroups": [
        {"name": "fill", "roles": ["prefill"], "replicas": 1},
        {"name": "write", "replicas": 1, "roles": ["decode"]},
    ],
}
GROWN = GROUPS | {
    "nodeGroups": [GROUPS["nodeGroups"][0], GROUPS["nodeGroups"][1] | {"replicas": 2}],
    "cluster": GROUPS["cluster"]
    | {"models": [{"source": "smollm2-135m", "prefill": {"workers": 1}, "decode": {"workers": 2}}]},
}

Manifest = dict[str, Any]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@dataclass
class Machines:
    """Network namespaces at one switch: the head's, and one for each node. The first node's has the addresses of the
    Valkey pod and of routers too: the head's Ray takes port 6379 of every address."""

    prefix: str

    def __post_init__(self) -> None:
        self.head = f"{self.prefix}-head"
        self.nodes = [f"{self.prefix}-node{number}" for number in range(len(NODE_IPS))]
        self.switch = f"{self.prefix}-switch"

    def build(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        self._plug_in(self.head, HEAD_IP)
        for name, address in zip(self.nodes, NODE_IPS, strict=True):
            self._plug_in(name, address, *((VALKEY_IP, *ROUTER_IPS) if name == self.nodes[0] else ()))

    def _plug_in(self, name: str, *addresses: str) -> None:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        port = name.removeprefix(f"{self.prefix}-")
        run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
        run("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
        for address in addresses:
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")

    def destroy(self) -> None:
        for name in (self.head, *self.nodes, self.switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Pod:
    """One container of a rendered pod, as a process group in a machine's namespace.

    The kubelet's part: files of the ConfigMap, environment with Secrets and the pod's address, folders of its own.
    """

    def __init__(
        self,
        name: str,
        machine: str,
        ip: str,
        container: Manifest,
        folder: Path,
        files: dict[str, str],
        tree: Path = ROOT,
    ) -> None:
        self.name, self.machine, self.ip, self.folder, self._container = name, machine, ip, folder, container
        self.tree, self.template, self.is_ending = tree, "", False
        self.termination_log = folder / "termination-log"
        self._paths = {
            "/etc/tandem/": f"{folder}/etc/",
            "/tmp/tandem": f"{folder}/tmp",
            "/dev/termination-log": str(self.termination_log),
            "/home/tandem": f"{folder}/home",
            **SERVICE_NAMES,
        }
        for name in ("etc", "home", "bin", "data"):
            (folder / name).mkdir(parents=True)
        self.mount(files)
        (folder / "bin" / "valkey-server").symlink_to(embedded_redis.binary())
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    def mount(self, files: dict[str, str]) -> None:
        """Files of the ConfigMap, also changed ones."""
        for name, text in files.items():
            (self.folder / "new").write_text(self._here(text))
            (self.folder / "new").rename(self.folder / "etc" / name)

    def _here(self, text: str) -> str:
        for path, here in self._paths.items():
            text = text.replace(path, here)
        return text

    def env(self, given: dict[str, str]) -> dict[str, str]:
        """As the kubelet fills it, `$(NAME)` included; the models are this machine's own."""
        found: dict[str, str] = {}
        for entry in self._container["env"]:
            if "value" in entry:
                text = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], entry["value"])
            elif "fieldRef" in entry["valueFrom"]:
                text = self.ip if entry["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP" else self.name
            elif (secret := entry["valueFrom"]["secretKeyRef"]["name"]) in given:
                text = given[secret]
            else:
                continue
            found[entry["name"]] = self._here(text)
        found |= {
            "TANDEM_CACHE": str(cache_dir()),
            "XDG_RUNTIME_DIR": f"{self.folder.parent}/r{self.name[0]}",  # one path in every pod of a kind
            "RAY_TMPDIR": f"{self.folder}/ray",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(self.tree),
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        return found | {name: self._here(text) for name, text in given.items() if name.isupper() or "_" in name}

    def may_restart(self) -> bool:
        """As the kubelet does: a node may have come before the head's own Ray node was known to Ray."""
        self.restarts += 1
        if self.restarts <= MOST_RESTARTS:
            self.restart()
        return self.restarts <= MOST_RESTARTS

    def restart(self) -> None:
        self.process = self._popen(self.command)

    @property
    def command(self) -> list[str]:
        """As Kubernetes fills it from the environment."""
        given = [*self._container["command"], *self._container.get("args", [])]
        return [re.sub(r"\$\((POD_\w+)\)", lambda match: self._env[match[1]], part) for part in given]

    def start(self, given: dict[str, str]) -> None:
        self._env = self.env(given)
        self.restart()

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.machine, *(self._here(part) for part in command)],
                env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=self.folder / "data",
            )  # fmt: skip

    def execute(self, command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` and exec probes do."""
        return subprocess.run(
            ["ip", "netns", "exec", self.machine, *(self._here(part) for part in command)],
            env=self._env, capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip

    def probe(self, name: str) -> bool:
        """One try of the container's probe, by whatever means it names."""
        probe = self._container[name]
        if "exec" in probe:
            return self.execute(probe["exec"]["command"]).returncode == 0
        named = probe.get("tcpSocket", probe.get("httpGet"))["port"]
        port = next(p["containerPort"] for p in self._container["ports"] if p["name"] == named)
        if "tcpSocket" in probe:
            return self.execute(["bash", "-c", f"</dev/tcp/{self.ip}/{port}"]).returncode == 0
        url = f"http://{self.ip}:{port}{probe['httpGet']['path']}"
        return self.execute(["curl", "--fail", "--silent", "--max-time", "5", url]).returncode == 0

    def terminate(self, grace_s: float) -> int:
        """preStop, the image's STOPSIGNAL, and what is left after the grace is killed (which fails the test)."""
        assert self.process is not None
        stop = signal.SIGINT
        if hook := self._container.get("lifecycle", {}).get("preStop"):
            command = hook["exec"]["command"]
            if command[0] == "/bin/bash":  # a node's, which ends the pod's process 1
                command, stop = ["/bin/bash", "-c", command[-1].partition(";")[0]], signal.SIGTERM
            assert self.execute(command).returncode == 0
        self.process.send_signal(stop)
        return self.process.wait(grace_s)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else "not started"


@dataclass
class Deployment:
    """What `helm install` and KubeRay would make of the values."""

    machines: Machines
    folder: Path
    manifests: dict[tuple[str, str], Manifest]
    pods: dict[str, Pod] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    seen: set[int] = field(default_factory=set)
    tree: Path = ROOT  # of pods that start: their image
    _started: int = 0

    def start(self) -> None:
        config = self.manifests["ConfigMap", "test-tandem"]["data"]
        valkey = self.manifests["Deployment", "test-tandem-valkey"]["spec"]
        (container,) = valkey["template"]["spec"]["containers"]
        self.pods["valkey"] = Pod("valkey", self.machines.nodes[0], VALKEY_IP, container, self.folder / "v", config)
        self.pods["valkey"].start(self._given)
        self.start_head()
        self.wait(self.ray_answers, 90.0)  # KubeRay's own init container of nodes
        for number in range(len(self._node_groups)):
            self.start_node(number)
        for number in range(self._router_replicas):
            self.add_router(number)

    @property
    def _given(self) -> dict[str, str]:
        passwords = {"tandem-valkey": "url-safe-password", "tandem-ray": "another-password"}
        return passwords | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def _router_replicas(self) -> int:
        found = self.manifests.get(("Deployment", "test-tandem-router"))
        return 0 if found is None else int(found["spec"]["replicas"])

    def start_head(self) -> Pod:
        """A head pod, with folders of its own."""
        group = self.manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]
        return self._start_ray("head", self.machines.head, HEAD_IP, group)

    @property
    def _node_groups(self) -> list[Manifest]:
        """The group of each node pod."""
        groups = self.manifests["RayCluster", "test-tandem"]["spec"]["workerGroupSpecs"]
        return [group for group in groups for _ in range(group["replicas"])]

    def start_node(self, number: int) -> Pod:
        name = f"node{number or ''}"
        return self._start_ray(name, self.machines.nodes[number], NODE_IPS[number], self._node_groups[number])

    def _start_ray(self, name: str, machine: str, ip: str, group: Manifest) -> Pod:
        ray = self.manifests["RayCluster", "test-tandem"]["spec"]
        (container,) = group["template"]["spec"]["containers"]
        config = self.manifests["ConfigMap", "test-tandem"]["data"]
        self._started += 1
        pod = Pod(name, machine, ip, container, self.folder / f"{name[0]}{self._started}", config, self.tree)
        pod.template = group["template"]["metadata"].get("annotations", {}).get("tandem/template", "")
        self.pods[name] = pod
        pod.start(self._given | _kuberay_env(ray, group, container, is_head=name == "head"))
        return pod

    def add_router(self, number: int) -> Pod:
        (container,) = self.manifests["Deployment", "test-tandem-router"]["spec"]["template"]["spec"]["containers"]
        machine, name = self.machines.nodes[0], f"router-{'abc'[number]}"
        self._started += 1
        folder = self.folder / f"{name[-1]}{self._started}"
        self.pods[name] = pod = Pod(name, machine, ROUTER_IPS[number], container, folder, {}, self.tree)
        pod.start({})
        return pod

    def config_with(self, model: Manifest) -> str:
        """The head's cluster.yaml with changed fields of its model."""
        spec = yaml.safe_load(self.manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
        for name, fields in model.items():
            spec["models"][0][name] |= fields
        return yaml.safe_dump(spec)

    def ray_answers(self) -> bool:
        return self.pods["head"].execute(["ray", "health-check", "--address", f"{HEAD_IP}:6379"]).returncode == 0

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [name for name, pod in self.pods.items() if pod.process and pod.process.poll() is not None]
            for name in [name for name in ended if self.pods[name].may_restart()]:
                ended.remove(name)
            assert not ended, f"{ended} ended:\n{self.logs}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s:\n{self.logs}"
            self.note_processes()
            time.sleep(0.5)

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{pod.log}" for name, pod in self.pods.items())

    def note_processes(self) -> None:
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                children = psutil.Process(pod.process.pid).children(recursive=True)
                self.seen |= {pod.process.pid, *(child.pid for child in children)}

    def tandem_processes(self) -> list[str]:
        """What is still alive of what was started, Ray's own and Valkey aside."""
        found = []
        for pid in self.seen:
            try:
                command = " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:
                continue
            if re.search(r" -m (cluster|router|kvtransfer|worker|cluster.backends.rank_process)\b|tandem up", command):
                found.append(command)
        return found

    def status(self) -> Manifest:
        done = self.pods["head"].execute(["tandem", "status", "--json"])
        assert done.returncode == 0, done.stderr
        status: Manifest = json.loads(done.stdout)
        return status

    def kill(self) -> None:
        """Whatever a failed test left, by process id."""
        self.note_processes()
        for pid in self.seen:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for pod in self.pods.values():
            if pod.process is not None:
                pod.process.wait(10)


def _kuberay_env(ray: Manifest, group: Manifest, container: Manifest, *, is_head: bool) -> dict[str, str]:
    """What KubeRay 1.7 adds to a Ray container whose command is its own."""
    kept = ray.get("gcsFaultToleranceOptions")
    tables = {}
    if kept is not None and is_head:
        tables = {
            "RAY_REDIS_ADDRESS": kept["redisAddress"],
            "REDIS_USERNAME": kept["redisUsername"]["value"],
            "REDIS_PASSWORD": "another-password",
            "RAY_external_storage_namespace": kept["externalStorageNamespace"],
        }
    elif kept is not None:
        tables = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    head = "test-tandem-head-svc.serving.svc.cluster.local"
    requests = container["resources"]["requests"]
    params = {
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "memory": str(4 << 30),
        "num-cpus": requests["cpu"],
    } | group["rayStartParams"]
    if labels := group.get("labels"):
        params["labels"] = ",".join(f"{key}={value}" for key, value in labels.items())
    if "REDIS_PASSWORD" in tables:
        params |= {"redis-username": "$REDIS_USERNAME", "redis-password": "$REDIS_PASSWORD"}
    first = "ray start --head" if is_head else f"ray start --address={head}:6379"
    command = f"{first} --block {' '.join(f'--{key}={value}' for key, value in sorted(params.items()))}"
    return {
        "KUBERAY_GEN_RAY_START_CMD": command,
        "RAY_ADDRESS": "127.0.0.1:6379" if is_head else f"{head}:6379",
        "RAY_PORT": "6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        **tables,
    }


@pytest.fixture
def manifests(tmp_path: Path, request: pytest.FixtureRequest) -> dict[tuple[str, str], Manifest]:
    pull(DEMO_MODEL)  # the machines have no way out
    return rendered(getattr(request, "param", VALUES), tmp_path)


def rendered(given: Manifest, folder: Path) -> dict[tuple[str, str], Manifest]:
    helm = run(str(ROOT / "scripts" / "fetch-helm.sh")).strip()
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump(given))
    chart = str(ROOT / "helm" / "tandem")
    text = run(helm, "template", "test", chart, "--namespace", "serving", "--values", str(values))
    found = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in found}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    built = Machines(f"td{os.getpid() % 100000}")
    try:
        built.build()
        yield built
    finally:
        built.destroy()


@pytest.fixture
def deployment(machines: Machines, manifests: dict[tuple[str, str], Manifest], tmp_path: Path) -> Iterator[Deployment]:
    folder = Path(f"/tmp/{tmp_path.name[:2]}{os.getpid()}")  # short: Ray's unix sockets lie below it
    folder.mkdir(mode=0o700)
    deployed = Deployment(machines, folder, manifests)
    try:
        yield deployed
    finally:
        deployed.kill()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def ask(pod: Pod, port: int, max_tokens: int, ip: str = HEAD_IP) -> subprocess.Popen[bytes]:
    """Asks for a completion at a port of the Service, as a client on that pod's machine."""
    body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": max_tokens, "temperature": 0}
    url, data = f"http://{ip}:{port}/v1/completions", json.dumps(body | {"ignore_eos": True})
    curl = ["curl", "--fail-with-body", "--silent", "--show-error", "--max-time", "90", url]
    return subprocess.Popen(
        ["ip", "netns", "exec", pod.machine, *curl, "-H", "Content-Type: application/json", "-d", data],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def answer_of(client: subprocess.Popen[bytes]) -> Manifest:
    out, err = client.communicate(timeout=100)
    assert client.returncode == 0, out + err
    answer: Manifest = json.loads(out)
    return answer


def link_of(status: Manifest) -> Manifest:
    """The only one: from the prefill worker to the decode worker."""
    (link,) = next(worker["links"] for worker in status["workers"] if worker["role"] == "prefill")
    assert isinstance(link, dict)
    return link


def test_the_pods_of_two_machines_answer_and_end_cleanly(deployment: Deployment) -> None:
    deployment.start()
    head, node = deployment.pods["head"], deployment.pods["node"]
    deployment.wait(lambda: head.probe("startupProbe"), 150.0)
    assert head.probe("readinessProbe")
    assert head.probe("livenessProbe")
    assert node.probe("readinessProbe")
    assert node.probe("livenessProbe")

    answers = [answer_of(ask(node, port, 8))["choices"][0]["text"] for port in (8000, 8001)]
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]

    status = deployment.status()
    hosts = {worker["role"]: worker["address"].partition(":")[0] for worker in status["workers"]}
    assert sorted(hosts.values()) == [HEAD_IP, NODE_IP]
    for worker in status["workers"]:
        blocks = worker["blocks"]
        assert blocks["leased"] == blocks["in_use"] == 0
        assert blocks["free"] + blocks["cached"] == blocks["total"]

    assert link_of(status)["transport"] == "tcp"

    def handed_over() -> bool:
        answer_of(ask(node, 8000, 8))
        return bool(link_of(deployment.status())["bytes"])

    # The first may have come before a router knew of the link: then the decode worker prefilled them itself.
    deployment.wait(handed_over, 30.0)

    # A changed ConfigMap is applied by the running pods.
    before = {worker["id"]: worker["epoch"] for worker in status["workers"]}
    head.mount({"cluster.yaml": deployment.config_with({"prefill": {"workers": 0}, "decode": {"workers": 2}})})
    deployment.wait(lambda: {worker["role"] for worker in deployment.status()["workers"]} == {"decode"}, 60.0)
    assert {worker["id"]: worker["epoch"] for worker in deployment.status()["workers"]} == before

    # A running request is answered to its end while the head drains.
    running = ask(node, 8000, 100)
    deployment.wait(lambda: any(worker["requests"]["running"] for worker in deployment.status()["workers"]), 20.0)
    deployment.note_processes()
    assert head.terminate(60.0) == 0, head.log
    assert answer_of(running)["usage"]["completion_tokens"] == 100
    assert deployment.tandem_processes() == []  # on both machines; Ray's end with their container


def epochs(deployment: Deployment) -> dict[str, int]:
    return {worker["id"]: worker["epoch"] for worker in deployment.status()["workers"]}


def states(deployment: Deployment) -> dict[str, str]:
    return {router["id"]: router["state"] for router in deployment.status()["routers"]}


class Clients:
    """Ask one ready router after another without end, as through the endpoints of a Service."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._ended = threading.Event()
        self.answers = 0
        self.failures: list[str] = []
        self._ready: list[Pod] = []
        self._threads = [threading.Thread(target=self._watch), *(threading.Thread(target=self._ask) for _ in range(2))]
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.3):
            pods = [pod for name, pod in list(self._deployment.pods.items()) if name.startswith("router")]
            self._ready = [pod for pod in pods if pod.probe("readinessProbe")]

    def _ask(self) -> None:
        turn = 0
        while not self._ended.is_set():
            turn += 1
            ready = self._ready
            if not ready:
                time.sleep(0.1)
                continue
            pod = ready[turn % len(ready)]
            out, err = ask(pod, 8000, 8, pod.ip).communicate(timeout=100)
            if b"Paris" in out:
                self.answers += 1
            else:
                self.failures.append(f"{pod.name}: {out!r} {err!r}")

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.acceptance(7, here="a head pod with Ray's head and GCS, of a chart with routers in pods of their own")
@pytest.mark.parametrize("manifests", [ROUTER_PODS], indirect=True, ids=["router pods"])
def test_routers_in_pods_of_their_own_serve_while_the_head_is_replaced(deployment: Deployment) -> None:
    """Also through a rollout of the routers. No request fails, no worker restarts."""
    deployment.start()
    head, routers = deployment.pods["head"], [deployment.pods[f"router-{name}"] for name in "ab"]
    deployment.wait(lambda: head.probe("readinessProbe"), 60.0)
    deployment.wait(lambda: all(router.probe("readinessProbe") for router in routers), 150.0)
    assert all(router.probe("livenessProbe") for router in routers)
    assert states(deployment) == {"router-a": "ready", "router-b": "ready"}
    before = epochs(deployment)
    clients = Clients(deployment)
    try:
        deployment.wait(lambda: clients.answers >= 4, 60.0)
        assert head.process is not None
        family = [head.process.pid, *(each.pid for each in psutil.Process(head.process.pid).children(recursive=True))]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        head.process.wait(10)
        answered = clients.answers
        time.sleep(60.0)  # without a head
        assert clients.answers > answered
        head = deployment.start_head()
        deployment.wait(lambda: head.probe("readinessProbe"), 90.0)
        both = {"router-a": "ready", "router-b": "ready"}
        deployment.wait(lambda: head.execute(["tandem", "status"]).returncode == 0 and states(deployment) == both, 60.0)
        assert epochs(deployment) == before, deployment.logs
        assert not any("starting again" in router.log for router in routers), "with the same secrets"

        deployment.add_router(2)  # a rollout: one more, then one less
        deployment.wait(lambda: states(deployment).get("router-c") == "ready", 60.0)
        running = ask(routers[0], 8000, 100, routers[0].ip)
        time.sleep(0.5)
        gone = deployment.pods.pop("router-a")  # its endpoint goes
        time.sleep(1.0)
        assert gone.terminate(120.0) == 0, gone.log
        assert answer_of(running)["usage"]["completion_tokens"] == 100
        deployment.wait(lambda: states(deployment) == {"router-b": "ready", "router-c": "ready"}, 30.0)
    finally:
        clients.close()
    assert clients.failures == []
    assert epochs(deployment) == before
    for name in ("router-b", "router-c"):
        assert deployment.pods.pop(name).terminate(60.0) == 0
    deployment.note_processes()
    assert head.terminate(60.0) == 0, head.log
    assert "what runs goes on" in head.log
    assert deployment.tandem_processes() != [], "the next head would take them over"
    deployment.pods["node"].terminate(120.0)
    assert deployment.tandem_processes() == []


@pytest.mark.parametrize("manifests", [GROUPS], indirect=True, ids=["two groups"])
def test_a_node_group_grows_and_shrinks_and_no_request_fails(deployment: Deployment, tmp_path: Path) -> None:
    """Each role stays on the machines of its group."""
    deployment.start()
    head = deployment.pods["head"]
    deployment.wait(lambda: head.probe("readinessProbe"), 60.0)
    routers = [deployment.pods[f"router-{name}"] for name in "ab"]
    deployment.wait(lambda: all(router.probe("readinessProbe") for router in routers), 150.0)
    deployment.wait(lambda: head.execute(["tandem", "status"]).returncode == 0, 60.0)
    deployment.wait(lambda: hosts(deployment) == {"prefill-0": NODE_IPS[0], "decode-0": NODE_IPS[1]}, 60.0)
    before = epochs(deployment)
    clients = Clients(deployment)

    def upgrade(values: Manifest) -> None:
        deployment.manifests = rendered(values, tmp_path)
        head.mount({"cluster.yaml": deployment.manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"]})

    try:
        deployment.wait(lambda: clients.answers >= 4, 60.0)
        upgrade(GROWN)
        deployment.start_node(2)  # KubeRay's, of the group that grew
        deployment.wait(lambda: hosts(deployment).get("decode-1") == NODE_IPS[2], 120.0)
        assert {name: epoch for name, epoch in epochs(deployment).items() if name in before} == before
        answered = clients.answers
        deployment.wait(lambda: clients.answers >= answered + 4, 60.0)
        upgrade(GROUPS)
        deployment.wait(lambda: len(deployment.status()["workers"]) == 2, 60.0)
        gone = deployment.pods.pop("node2")
        gone.terminate(120.0)
        deployment.wait(lambda: sorted(hosts(deployment).values()) == sorted(NODE_IPS[:2]), 60.0)
        answered = clients.answers
        deployment.wait(lambda: clients.answers >= answered + 4, 60.0)
    finally:
        clients.close()
    assert clients.failures == []
    for worker in deployment.status()["workers"]:
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["cached"] == blocks["total"]


def hosts(deployment: Deployment) -> dict[str, str]:
    """The machine of each worker that serves."""
    workers = [worker for worker in deployment.status()["workers"] if worker["state"] == "ready"]
    return {worker["id"]: worker["address"].partition(":")[0] for worker in workers}


class Operator:
    """KubeRay, the kubelets and the API server, as far as a rollout meets them: lists Ray's pods with their readiness,
    and deletes one, which ends with its grace and is followed by another of the present template."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._ready: dict[Pod, bool] = {}
        self._ended = threading.Event()
        self.deleted: list[str] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._probe), threading.Thread(target=self._serve)]
        self._listening = threading.Event()
        for thread in self._threads:
            thread.start()
        assert self._listening.wait(10)

    def _pods(self) -> dict[str, Pod]:
        return {name: pod for name, pod in self._deployment.pods.items() if name.startswith(("head", "node"))}

    def _probe(self) -> None:
        while not self._ended.wait(1.0):
            for pod in self._pods().values():
                self._ready[pod] = pod.probe("readinessProbe")

    def _serve(self) -> None:
        operator = self
        with Path(f"/var/run/netns/{self._deployment.machines.head}").open("rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET, of this thread

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"items": [operator.shown(*pod) for pod in operator._pods().items()]})

            def do_DELETE(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                operator.delete(self.path.rpartition("/")[2])
                self._answer({})

            def _answer(self, body: Manifest) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with HTTPServer((HEAD_IP, 8443), Handler) as server:
            server.timeout = 0.2
            self._listening.set()
            while not self._ended.is_set():
                server.handle_request()

    def shown(self, name: str, pod: Pod) -> Manifest:
        """As Kubernetes has it."""
        metadata = {
            "name": name,
            "uid": str(pod.folder),
            "labels": {"app.kubernetes.io/component": name[:4]},
            "annotations": {"tandem/template": pod.template},
        }
        if pod.is_ending:
            metadata["deletionTimestamp"] = "now"
        condition = {"type": "Ready", "status": str(self._ready.get(pod, False))}
        return {"metadata": metadata, "status": {"conditions": [condition]}}

    def delete(self, name: str) -> None:
        pod = self._deployment.pods[name]
        pod.is_ending = True
        self.deleted.append(name)
        thread = threading.Thread(target=self._replace, args=(name, pod))
        self._threads.append(thread)
        thread.start()

    def _replace(self, name: str, pod: Pod) -> None:
        assert pod.process is not None
        family = [psutil.Process(pod.process.pid), *psutil.Process(pod.process.pid).children(recursive=True)]
        try:
            pod.terminate(120.0)
        except Exception as error:
            self.problems.append(f"{name} did not end: {error}")
        for process in family:  # the container's end is theirs
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if name == "head":
            self._deployment.start_head()
        else:
            self._deployment.start_node(int(name[4:] or 0))

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def earlier_release(tmp_path: Path) -> Path:
    """This tree as one minor version before."""
    tree = tmp_path / "earlier"
    for package in (
        "cluster",
        "decode_worker",
        "kvtransfer",
        "planner",
        "prefill_worker",
        "router",
        "tandem",
        "worker",
    ):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = tree / "tandem" / "version.py"
    text = version.read_text()
    assert 'return version("tandem-serve")' in text
    version.write_text(text.replace('return version("tandem-serve")', 'return "0.0.9"'))
    return tree


@pytest.mark.acceptance(27, here="the pods of a chart: a head, three nodes and two routers, some hundred requests")
@pytest.mark.parametrize("manifests", [ROLLING], indirect=True, ids=["three nodes"])
def test_another_image_comes_to_one_pod_after_another_and_no_request_fails(
    deployment: Deployment, earlier_release: Path, tmp_path: Path
) -> None:
    """The head, three nodes and two routers of the release before become those of this one."""
    deployment.tree = earlier_release
    deployment.start()
    head = deployment.pods["head"]
    deployment.wait(lambda: head.probe("readinessProbe"), 60.0)
    routers = [deployment.pods[f"router-{name}"] for name in "ab"]
    deployment.wait(lambda: all(router.probe("readinessProbe") for router in routers), 150.0)
    deployment.wait(lambda: head.execute(["tandem", "status"]).returncode == 0, 60.0)
    assert deployment.status()["version"] == "0.0.9"
    deployment.tree = ROOT
    deployment.manifests = rendered(ROLLING | {"image": {"tag": "next"}}, tmp_path)
    ((job,),) = [[each["spec"] for (kind, _), each in deployment.manifests.items() if kind == "Job"]]
    (container,) = job["template"]["spec"]["containers"]
    clients, operator = Clients(deployment), Operator(deployment)
    rollout: subprocess.Popen[bytes] | None = None
    try:
        deployment.wait(lambda: clients.answers >= 4, 60.0)
        command = [sys.executable, *container["command"][1:], *container["args"], f"--api=http://{HEAD_IP}:8443"]
        given = [part.replace("test-tandem-control.serving.svc", HEAD_IP) for part in command]
        with (deployment.folder / "rollout").open("wb") as log:
            rollout = subprocess.Popen(
                ["ip", "netns", "exec", deployment.machines.head, *given], stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        deadline = time.monotonic() + 900.0
        while rollout.poll() is None and time.monotonic() < deadline:
            deployment.note_processes()
            time.sleep(1.0)
        said = (deployment.folder / "rollout").read_text()
        assert rollout.poll() == 0, said + deployment.logs
        assert operator.deleted == ["head", "node", "node1", "node2"], said
        assert {pod.template for pod in operator._pods().values()} == {
            part.rpartition(":")[2] for part in container["args"] if part.startswith("--pods=")
        }
        for number, name in ((2, "a"), (0, "b")):  # the Deployment's own rollout
            deployment.add_router(number)
            deployment.wait(lambda: all(state == "ready" for state in states(deployment).values()), 60.0)
            gone = deployment.pods.pop(f"router-{name}")
            time.sleep(1.0)
            assert gone.terminate(60.0) == 0, gone.log
        wanted = 10_000 if EVERY else 0
        deployment.wait(lambda: clients.answers >= wanted, 3600.0)
    finally:
        clients.close()
        operator.close()
        if rollout is not None and rollout.poll() is None:
            rollout.kill()
            rollout.wait()
    print(f"{clients.answers} answered, {len(clients.failures)} failed")
    assert (clients.failures, operator.problems) == ([], [])
    status = deployment.status()
    assert status["version"] != "0.0.9"
    for worker in status["workers"]:
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["leased"] + blocks["in_use"] == blocks["total"]
