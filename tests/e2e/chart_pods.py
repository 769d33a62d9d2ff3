"""The chart's pods as processes: what `helm template` renders, started as KubeRay and the kubelet would, each machine a
network namespace with a cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.backends import embedded_redis
from tandem.files import cache_dir

ROOT = Path(__file__).resolve().parents[2]
HEAD_IP, VALKEY_IP = "10.77.0.1", "10.77.0.3"
ROUTER_IPS = ("10.77.0.4", "10.77.0.5", "10.77.0.6")
NODE_IPS = ("10.77.0.2", "10.77.0.7", "10.77.0.8")
MOST_RESTARTS = 3  # of one pod

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@dataclass(frozen=True, slots=True)
class Machine:
    """`name`: of its network namespace."""

    name: str
    ip: str


@dataclass
class Machines:
    """Network namespaces at one switch: the head's, and one for each node. The first node's has the addresses of the
    Valkey pod and of routers too: the head's Ray takes port 6379 of every address."""

    prefix: str

    def __post_init__(self) -> None:
        self.head = Machine(f"{self.prefix}-head", HEAD_IP)
        self.nodes = [Machine(f"{self.prefix}-node{number}", ip) for number, ip in enumerate(NODE_IPS)]
        self.switch = f"{self.prefix}-switch"

    def build(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for machine in (self.head, *self.nodes):
            self._plug_in(machine.name, machine.ip, *((VALKEY_IP, *ROUTER_IPS) if machine == self.nodes[0] else ()))

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
        for name in (self.head.name, *(machine.name for machine in self.nodes), self.switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Pod:
    """One container of a rendered pod, as a process group in a machine's namespace.

    The kubelet's part: files of the ConfigMap, environment with Secrets and the pod's address, folders of its own.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        container: Manifest,
        folder: Path,
        files: dict[str, str],
        services: dict[str, str],
        tree: Path = ROOT,
    ) -> None:
        """`services`: the address behind each name. `tree`: its image."""
        self.name, self.machine, self.folder, self._container = name, machine, folder, container
        self.tree, self.template, self.is_ending = tree, "", False
        self.termination_log = folder / "termination-log"
        self._paths = {
            "/etc/tandem/": f"{folder}/etc/",
            "/tmp/tandem": f"{folder}/tmp",
            "/dev/termination-log": str(self.termination_log),
            "/home/tandem": f"{folder}/home",
            **services,
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
                text = self.machine.ip if entry["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP" else self.name
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
                ["ip", "netns", "exec", self.machine.name, *(self._here(part) for part in command)],
                env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=self.folder / "data",
            )  # fmt: skip

    def execute(self, command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` and exec probes do."""
        return subprocess.run(
            ["ip", "netns", "exec", self.machine.name, *(self._here(part) for part in command)],
            env=self._env, capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip

    def probe(self, name: str) -> bool:
        """One try of the container's probe, by whatever means it names."""
        try:
            return self._probe(name)
        except subprocess.TimeoutExpired:
            return False

    def _probe(self, name: str) -> bool:
        probe = self._container[name]
        if "exec" in probe:
            return self.execute(probe["exec"]["command"]).returncode == 0
        named = probe.get("tcpSocket", probe.get("httpGet"))["port"]
        port = next(p["containerPort"] for p in self._container["ports"] if p["name"] == named)
        if "tcpSocket" in probe:
            return self.execute(["bash", "-c", f"</dev/tcp/{self.machine.ip}/{port}"]).returncode == 0
        url = f"http://{self.machine.ip}:{port}{probe['httpGet']['path']}"
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
    """What `helm install` and KubeRay would make of the values. `tree`: the image of pods that start."""

    machines: Machines
    folder: Path
    manifests: Manifests
    release: str = "test"
    tree: Path = ROOT
    pods: dict[str, Pod] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    seen: set[int] = field(default_factory=set)
    _started: int = 0

    def __post_init__(self) -> None:
        self.name = f"{self.release}-tandem"
        self.head_machine = self.machines.head

    @property
    def _services(self) -> dict[str, str]:
        return {
            f"{self.name}-head-svc.serving.svc.cluster.local": self.head_machine.ip,
            f"{self.name}-control.serving.svc": self.head_machine.ip,
            f"{self.name}-valkey": VALKEY_IP,
        }

    @property
    def _config(self) -> dict[str, str]:
        """Files of the ConfigMap."""
        return dict(self.manifests["ConfigMap", self.name]["data"])

    def start(self) -> None:
        if valkey := self.manifests.get(("Deployment", f"{self.name}-valkey")):
            (container,) = valkey["spec"]["template"]["spec"]["containers"]
            machine = Machine(self.machines.nodes[0].name, VALKEY_IP)
            pod = self._pod("valkey", "v", machine, container, self._config)
            pod.start(self._given)
            self.pods["valkey"] = pod
        self.start_head()
        self.wait(self.ray_answers, 90.0)  # KubeRay's own init container of nodes
        for number in range(len(self._node_groups)):
            self.start_node(number)
        for number in range(self._router_replicas):
            self.add_router(number)

    def start_and_wait(self) -> None:
        """Until the head and all routers are ready and the controller answers."""
        self.start()
        head, routers = self.pods["head"], self.routers
        self.wait(lambda: head.probe("readinessProbe"), 150.0)
        self.wait(lambda: all(router.probe("readinessProbe") for router in routers), 150.0)
        self.wait(lambda: head.execute(["tandem", "status"]).returncode == 0, 60.0)

    @property
    def routers(self) -> list[Pod]:
        """Pods of their own."""
        return [pod for name, pod in list(self.pods.items()) if name.startswith("router")]

    @property
    def _given(self) -> dict[str, str]:
        passwords = {"tandem-valkey": "url-safe-password", "tandem-ray": "another-password"}
        return passwords | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def _router_replicas(self) -> int:
        found = self.manifests.get(("Deployment", f"{self.name}-router"))
        return 0 if found is None else int(found["spec"]["replicas"])

    def start_head(self) -> Pod:
        """A head pod, with folders of its own."""
        return self._start_ray("head", self.head_machine, self._ray["headGroupSpec"])

    @property
    def _ray(self) -> Manifest:
        spec: Manifest = self.manifests["RayCluster", self.name]["spec"]
        return spec

    @property
    def _node_groups(self) -> list[Manifest]:
        """The group of each node pod."""
        return [group for group in self._ray.get("workerGroupSpecs", []) for _ in range(group["replicas"])]

    def start_node(self, number: int) -> Pod:
        return self._start_ray(f"node{number or ''}", self.machines.nodes[number], self._node_groups[number])

    def _start_ray(self, name: str, machine: Machine, group: Manifest) -> Pod:
        (container,) = group["template"]["spec"]["containers"]
        pod = self._pod(name, name[0], machine, container, self._config)
        pod.template = group["template"]["metadata"].get("annotations", {}).get("tandem/template", "")
        head = f"{self.name}-head-svc.serving.svc.cluster.local"
        pod.start(self._given | _kuberay_env(self._ray, group, container, head, is_head=name == "head"))
        self.pods[name] = pod
        return pod

    def add_router(self, number: int) -> Pod:
        (container,) = self.manifests["Deployment", f"{self.name}-router"]["spec"]["template"]["spec"]["containers"]
        letter = "abc"[number]
        machine = Machine(self.machines.nodes[0].name, ROUTER_IPS[number])
        pod = self._pod(f"router-{letter}", letter, machine, container, {})
        pod.start({})
        self.pods[pod.name] = pod
        return pod

    def _pod(self, name: str, folder: str, machine: Machine, container: Manifest, files: dict[str, str]) -> Pod:
        """Not started, and not among `pods` before: others probe those."""
        self._started += 1
        place = self.folder / f"{folder}{self._started}"
        return Pod(name, machine, container, place, files, self._services, self.tree)

    def config_with(self, model: Manifest) -> str:
        """The head's cluster.yaml with changed fields of its model."""
        spec = yaml.safe_load(self._config["cluster.yaml"])
        for name, fields in model.items():
            spec["models"][0][name] |= fields
        return yaml.safe_dump(spec)

    def ray_answers(self) -> bool:
        address = f"{self.head_machine.ip}:6379"
        return self.pods["head"].execute(["ray", "health-check", "--address", address]).returncode == 0

    def change(self, values: Manifest) -> None:
        """As `helm upgrade` and the kubelet bring it: the ConfigMap to the head that runs."""
        self.manifests = rendered(values, self.folder, self.release)
        self.pods["head"].mount({"cluster.yaml": self._config["cluster.yaml"]})

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

    @property
    def epochs(self) -> dict[str, int]:
        return {worker["id"]: worker["epoch"] for worker in self.status()["workers"]}

    @property
    def router_states(self) -> dict[str, str]:
        return {router["id"]: router["state"] for router in self.status()["routers"]}

    @property
    def hosts(self) -> dict[str, str]:
        """The machine's address of each worker that serves."""
        workers = [worker for worker in self.status()["workers"] if worker["state"] == "ready"]
        return {worker["id"]: worker["address"].partition(":")[0] for worker in workers}

    def assert_conserved(self) -> None:
        """Nothing runs, and no block is lost."""
        for worker in self.status()["workers"]:
            blocks = worker["blocks"]
            assert blocks["leased"] == blocks["in_use"] == 0, worker
            assert blocks["free"] + blocks["cached"] == blocks["total"], worker

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


def _kuberay_env(ray: Manifest, group: Manifest, container: Manifest, head: str, *, is_head: bool) -> dict[str, str]:
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


def rendered(given: Manifest, folder: Path, release: str = "test") -> Manifests:
    helm = run(str(ROOT / "scripts" / "fetch-helm.sh")).strip()
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump(given))
    chart = str(ROOT / "helm" / "tandem")
    text = run(helm, "template", release, chart, "--namespace", "serving", "--values", str(values))
    found = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in found}


def ask(pod: Pod, port: int, max_tokens: int, ip: str = "") -> subprocess.Popen[bytes]:
    """Asks for a completion at a port of the Service, as a client on that pod's machine. `ip`: default the pod's."""
    body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": max_tokens, "temperature": 0}
    url, data = f"http://{ip or pod.machine.ip}:{port}/v1/completions", json.dumps(body | {"ignore_eos": True})
    curl = ["curl", "--fail-with-body", "--silent", "--show-error", "--max-time", "90", url]
    return subprocess.Popen(
        ["ip", "netns", "exec", pod.machine.name, *curl, "-H", "Content-Type: application/json", "-d", data],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def answer_of(client: subprocess.Popen[bytes]) -> Manifest:
    out, err = client.communicate(timeout=100)
    assert client.returncode == 0, out + err
    answer: Manifest = json.loads(out)
    return answer


class Clients:
    """They ask without end, each time the next of those pods that are ready, as through the endpoints of a Service.

    `turns`: pods with routers by turns, one more than once if it has a greater weight. `number`: of clients.
    """

    def __init__(self, turns: Callable[[], list[Pod]], number: int = 2) -> None:
        self._turns = turns
        self._ended = threading.Event()
        self.answers: Counter[str] = Counter()  # of each pod
        self.failures: list[str] = []
        self._ready: set[Pod] = set()
        self._threads = [
            threading.Thread(target=self._watch),
            *(threading.Thread(target=self._ask) for _ in range(number)),
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.3):
            self._ready = {pod for pod in set(self._turns()) if pod.probe("readinessProbe")}

    def _ask(self) -> None:
        for turn in itertools.count():
            if self._ended.is_set():
                return
            ready = [pod for pod in self._turns() if pod in self._ready]
            if not ready:
                time.sleep(0.1)
                continue
            pod = ready[turn % len(ready)]
            out, err = ask(pod, 8000, 8).communicate(timeout=100)
            if b"Paris" in out:
                self.answers[pod.name] += 1
            else:
                self.failures.append(f"{pod.name}: {out!r} {err!r}")

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


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

    @property
    def pods(self) -> dict[str, Pod]:
        return {name: pod for name, pod in list(self._deployment.pods.items()) if name.startswith(("head", "node"))}

    def _probe(self) -> None:
        while not self._ended.wait(1.0):
            for pod in self.pods.values():
                self._ready[pod] = pod.probe("readinessProbe")

    def _serve(self) -> None:
        operator = self
        with Path(f"/var/run/netns/{self._deployment.head_machine.name}").open("rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET, of this thread

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"items": [operator.shown(*pod) for pod in operator.pods.items()]})

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
