"""The chart's pods, run here as processes: two machines and a Valkey, and what a platform team does to them."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tests.e2e.chart_pods import (
    HEAD_IP,
    NODE_IPS,
    ROOT,
    Clients,
    Deployment,
    Machines,
    Manifest,
    Manifests,
    Operator,
    Pod,
    answer_of,
    ask,
    rendered,
)

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

EVERY = bool(os.environ.get("TANDEM_SOAK"))
VALUES: dict[str, Any] = {
    "cluster": {
        "models": [{"source": "smollm2-135m", "prefill": {"workers": 1}, "decode": {"workers": 1}}],
        "router": {"replicas": 2, "disaggregation": "always", "drain_timeout_s": 90},
        "security": {"allow_plaintext": True},
    },
    "terminationGracePeriodSeconds": 120,
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

# Two releases behind one route, a pod each.
ONE_POD: dict[str, Any] = {
    "cluster": VALUES["cluster"]
    | {
        "router": {"disaggregation": "always", "drain_timeout_s": 90},
        "security": {"allow_plaintext": True, "auth": {"mode": "none"}},
    },
    "node": {"resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}},
    "preStopSeconds": 1,
    "terminationGracePeriodSeconds": 120,
}


def routed(weight: int, green: int) -> Manifest:
    """Values of the first release, whose route leads to the second too."""
    backends = [{"release": "green", "weight": green}] if green else []
    gateway = {"enabled": True, "parentRefs": [{"name": "gateway"}], "weight": weight, "backends": backends}
    return ONE_POD | {"gateway": gateway}


@pytest.fixture
def manifests(tmp_path: Path, request: pytest.FixtureRequest) -> Manifests:
    return rendered(getattr(request, "param", VALUES), tmp_path)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    pull(DEMO_MODEL)  # they have no way out
    built = Machines(f"td{os.getpid() % 100000}")
    try:
        built.build()
        yield built
    finally:
        built.destroy()


@contextmanager
def deployed(machines: Machines, manifests: Manifests, release: str = "test") -> Iterator[Deployment]:
    """Not started."""
    folder = Path(tempfile.mkdtemp(prefix=release[:2], dir="/tmp"))  # short: Ray's unix sockets lie below it
    try:
        deployment = Deployment(machines, folder, manifests, release)
        try:
            yield deployment
        finally:
            deployment.kill()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def deployment(machines: Machines, manifests: Manifests) -> Iterator[Deployment]:
    with deployed(machines, manifests) as found:
        yield found


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

    answers = [answer_of(ask(node, port, 8, HEAD_IP))["choices"][0]["text"] for port in (8000, 8001)]
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]

    assert sorted(deployment.hosts.values()) == [HEAD_IP, NODE_IPS[0]]
    deployment.assert_conserved()
    assert link_of(deployment.status())["transport"] == "tcp"

    def handed_over() -> bool:
        answer_of(ask(node, 8000, 8, HEAD_IP))
        return bool(link_of(deployment.status())["bytes"])

    # The first may have come before a router knew of the link: then the decode worker prefilled them itself.
    deployment.wait(handed_over, 30.0)

    # A changed ConfigMap is applied by the running pods.
    before = deployment.epochs
    head.mount({"cluster.yaml": deployment.config_with({"prefill": {"workers": 0}, "decode": {"workers": 2}})})
    deployment.wait(lambda: {worker["role"] for worker in deployment.status()["workers"]} == {"decode"}, 60.0)
    assert deployment.epochs == before

    # A running request is answered to its end while the head drains.
    running = ask(node, 8000, 300, HEAD_IP)
    deployment.wait(lambda: any(worker["requests"]["running"] for worker in deployment.status()["workers"]), 20.0)
    deployment.note_processes()
    assert head.terminate(120.0) == 0, head.log
    assert answer_of(running)["usage"]["completion_tokens"] == 300
    assert deployment.tandem_processes() == []  # on both machines; Ray's end with their container


@pytest.mark.acceptance(7, here="a head pod with Ray's head and GCS, of a chart with routers in pods of their own")
@pytest.mark.parametrize("manifests", [ROUTER_PODS], indirect=True, ids=["router pods"])
def test_routers_in_pods_of_their_own_serve_while_the_head_is_replaced(deployment: Deployment) -> None:
    """Also through a rollout of the routers. No request fails, no worker restarts."""
    deployment.start_and_wait()
    head, routers = deployment.pods["head"], deployment.routers
    assert all(router.probe("livenessProbe") for router in routers)
    assert deployment.router_states == {"router-a": "ready", "router-b": "ready"}
    before = deployment.epochs
    clients = Clients(lambda: deployment.routers)
    try:
        deployment.wait(lambda: clients.answers.total() >= 4, 60.0)
        assert head.process is not None
        family = [head.process.pid, *(each.pid for each in psutil.Process(head.process.pid).children(recursive=True))]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        head.process.wait(10)
        answered = clients.answers.total()
        time.sleep(60.0)  # without a head
        assert clients.answers.total() > answered
        head = deployment.start_head()
        deployment.wait(lambda: head.probe("readinessProbe"), 90.0)
        both = {"router-a": "ready", "router-b": "ready"}
        deployment.wait(
            lambda: head.execute(["tandem", "status"]).returncode == 0 and deployment.router_states == both, 60.0
        )
        assert deployment.epochs == before, deployment.logs
        assert not any("starting again" in router.log for router in routers), "with the same secrets"

        deployment.add_router(2)  # a rollout: one more, then one less
        deployment.wait(lambda: deployment.router_states.get("router-c") == "ready", 60.0)
        running = ask(routers[0], 8000, 300)
        time.sleep(0.5)
        gone = deployment.pods.pop("router-a")  # its endpoint goes
        time.sleep(1.0)
        assert gone.terminate(120.0) == 0, gone.log
        assert answer_of(running)["usage"]["completion_tokens"] == 300
        deployment.wait(lambda: deployment.router_states == {"router-b": "ready", "router-c": "ready"}, 30.0)
    finally:
        clients.close()
    assert clients.failures == []
    assert deployment.epochs == before
    for name in ("router-b", "router-c"):
        assert deployment.pods.pop(name).terminate(60.0) == 0
    deployment.note_processes()
    assert head.terminate(60.0) == 0, head.log
    assert "what runs goes on" in head.log
    assert deployment.tandem_processes() != [], "the next head would take them over"
    deployment.pods["node"].terminate(120.0)
    assert deployment.tandem_processes() == []


@pytest.mark.parametrize("manifests", [GROUPS], indirect=True, ids=["two groups"])
def test_a_node_group_grows_and_shrinks_and_no_request_fails(deployment: Deployment) -> None:
    """Each role stays on the machines of its group."""
    deployment.start_and_wait()
    deployment.wait(lambda: deployment.hosts == {"prefill-0": NODE_IPS[0], "decode-0": NODE_IPS[1]}, 60.0)
    before = deployment.epochs
    clients = Clients(lambda: deployment.routers)

    try:
        deployment.wait(lambda: clients.answers.total() >= 4, 60.0)
        deployment.change(GROWN)
        deployment.start_node(2)  # KubeRay's, of the group that grew
        deployment.wait(lambda: deployment.hosts.get("decode-1") == NODE_IPS[2], 120.0)
        assert {name: epoch for name, epoch in deployment.epochs.items() if name in before} == before
        answered = clients.answers.total()
        deployment.wait(lambda: clients.answers.total() >= answered + 4, 60.0)
        deployment.change(GROUPS)
        deployment.wait(lambda: len(deployment.status()["workers"]) == 2, 60.0)
        gone = deployment.pods.pop("node2")
        gone.terminate(120.0)
        deployment.wait(lambda: sorted(deployment.hosts.values()) == sorted(NODE_IPS[:2]), 60.0)
        answered = clients.answers.total()
        deployment.wait(lambda: clients.answers.total() >= answered + 4, 60.0)
    finally:
        clients.close()
    assert clients.failures == []
    deployment.assert_conserved()


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
    deployment.start_and_wait()
    assert deployment.status()["version"] == "0.0.9"
    deployment.tree = ROOT
    deployment.manifests = rendered(ROLLING | {"image": {"tag": "next"}}, tmp_path)
    ((job,),) = [[each["spec"] for (kind, _), each in deployment.manifests.items() if kind == "Job"]]
    (container,) = job["template"]["spec"]["containers"]
    clients, operator = Clients(lambda: deployment.routers, 6 if EVERY else 2), Operator(deployment)
    rollout: subprocess.Popen[bytes] | None = None
    try:
        deployment.wait(lambda: clients.answers.total() >= 4, 60.0)
        command = [sys.executable, *container["command"][1:], *container["args"], f"--api=http://{HEAD_IP}:8443"]
        given = [part.replace("test-tandem-control.serving.svc", HEAD_IP) for part in command]
        with (deployment.folder / "rollout").open("wb") as log:
            rollout = subprocess.Popen(
                ["ip", "netns", "exec", deployment.head_machine.name, *given], stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        deadline = time.monotonic() + 900.0
        while rollout.poll() is None and time.monotonic() < deadline:
            deployment.note_processes()
            time.sleep(1.0)
        said = (deployment.folder / "rollout").read_text()
        assert rollout.poll() == 0, said + deployment.logs
        assert operator.deleted == ["head", "node", "node1", "node2"], said
        assert {pod.template for pod in operator.pods.values()} == {
            part.rpartition(":")[2] for part in container["args"] if part.startswith("--pods=")
        }
        for number, name in ((2, "a"), (0, "b")):  # the Deployment's own rollout
            deployment.add_router(number)
            deployment.wait(lambda: all(state == "ready" for state in deployment.router_states.values()), 60.0)
            gone = deployment.pods.pop(f"router-{name}")
            time.sleep(1.0)
            assert gone.terminate(60.0) == 0, gone.log
        wanted = 10_000 if EVERY else 0
        deployment.wait(lambda: clients.answers.total() >= wanted, 9000.0)
    finally:
        clients.close()
        operator.close()
        if rollout is not None and rollout.poll() is None:
            rollout.kill()
            rollout.wait()
    print(f"{clients.answers.total()} answered, {len(clients.failures)} failed")
    assert (clients.failures, operator.problems) == ([], [])
    assert deployment.status()["version"] != "0.0.9"
    deployment.assert_conserved()


@pytest.mark.parametrize("manifests", [routed(1, 0)], indirect=True, ids=["two releases"])
def test_weights_lead_from_one_release_to_the_next_and_no_request_fails(
    deployment: Deployment, earlier_release: Path, tmp_path: Path
) -> None:
    """As docs/deploy.md tells it ("Two releases behind one route"). The Gateway is the clients' own choice, by the
    weights of the rendered route."""
    deployment.tree = earlier_release
    deployment.start_and_wait()
    before = deployment.epochs
    with deployed(deployment.machines, rendered(ONE_POD, tmp_path, "green"), "green") as green:
        green.head_machine = green.machines.nodes[1]
        pods = {"test-tandem-http": deployment.pods["head"]}

        def turns() -> list[Pod]:
            (rule,) = deployment.manifests["HTTPRoute", "test-tandem"]["spec"]["rules"]
            weights = {ref["name"]: ref.get("weight", 1) for ref in rule["backendRefs"]}
            return [
                pods[name] for name, weight in weights.items() for _ in range(weight // math.gcd(*weights.values()))
            ]

        clients = Clients(turns)
        try:
            deployment.wait(lambda: clients.answers.total() >= 4, 60.0)
            green.start_and_wait()
            green.pods["head"].name = "green"
            pods["green-tandem-http"] = green.pods["head"]
            for weight, other in ((90, 10), (50, 50), (0, 100)):
                template = deployment.manifests["RayCluster", "test-tandem"]
                deployment.change(routed(weight, other))
                assert deployment.manifests["RayCluster", "test-tandem"] == template, "nothing restarts"
                answered = clients.answers.copy()
                wanted = answered["green"] + 4
                deployment.wait(lambda wanted=wanted: clients.answers["green"] >= wanted, 120.0)  # type: ignore[misc]
                shares = clients.answers - answered
                assert shares["head"] > shares["green"] or weight < 90, shares
                assert shares["head"] <= 2 or weight > 0, "but those that had begun"
            assert deployment.epochs == before
            running = ask(deployment.pods["head"], 8000, 300)  # one that came before the last change
            deployment.wait(lambda: any(each["requests"]["running"] for each in deployment.status()["workers"]), 20.0)
            answered = clients.answers.copy()
            assert deployment.pods["head"].terminate(120.0) == 0  # uninstalled
            assert answer_of(running)["usage"]["completion_tokens"] == 300
            green.wait(lambda: clients.answers["green"] >= answered["green"] + 4, 60.0)
            assert clients.answers["head"] == answered["head"]
        finally:
            clients.close()
        assert clients.failures == []
        assert green.status()["version"] != "0.0.9"
        green.assert_conserved()
