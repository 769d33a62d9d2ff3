"""The chart, rendered by the real helm: what it makes, what it refuses, and that its spec is the product's spec."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tandem.config import ClusterSpec

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
POD_IP = "10.1.2.3"
REDIS_URL = "rediss://user:secret@redis.example:6380/0"

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def helm() -> str:
    found = subprocess.run([ROOT / "scripts" / "fetch-helm.sh"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def run_helm(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], check=False, capture_output=True, text=True)


def render(helm: str, *arguments: str) -> dict[tuple[str, str], Manifest]:
    """(kind, name) → manifest of `helm template`."""
    result = run_helm(helm, "template", "test", str(CHART), "--namespace", "serving", *arguments)
    assert result.returncode == 0, result.stderr
    manifests = [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def head_of(manifests: dict[tuple[str, str], Manifest]) -> Manifest:
    spec: Manifest = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]
    return spec


def container_of(group: Manifest) -> Manifest:
    (container,) = group["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def cluster_spec(manifests: dict[tuple[str, str], Manifest]) -> ClusterSpec:
    """The spec as the head's start script completes it."""
    text = manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"]
    completed = text.replace("${POD_IP}", POD_IP).replace("${TANDEM_REDIS_URL}", REDIS_URL)
    assert "${" not in completed
    return ClusterSpec.model_validate(yaml.safe_load(completed))


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_lint_is_clean(helm: str, values: Path | None) -> None:
    result = run_helm(helm, "lint", "--strict", str(CHART), *(["--values", str(values)] if values else []))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_every_rendered_spec_is_a_valid_cluster_spec(helm: str, values: Path | None) -> None:
    manifests = render(helm, *(["--values", str(values)] if values else []))
    spec = cluster_spec(manifests)
    assert (spec.router.http_host, spec.router.grpc_host) == (POD_IP, POD_IP)
    assert (spec.control.backend, spec.control.ray_address) == ("ray", "auto")


def test_values_under_cluster_reach_the_spec(helm: str) -> None:
    spec = cluster_spec(render(helm, "--values", str(CHART / "examples" / "gpu-node.yaml")))
    (model,) = spec.models
    assert (model.prefill.workers, model.decode.tp) == (4, 4)
    assert model.engine.kv_memory_bytes == 32 << 30
    assert spec.router.max_queued_requests == 1024


def test_the_head_starts_ray_and_then_tandem(helm: str) -> None:
    manifests = render(helm)
    cluster = manifests["RayCluster", "test-tandem"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    container = container_of(head_of(manifests))
    script = manifests["ConfigMap", "test-tandem"]["data"]["start-head.sh"]
    assert container["command"][-1] == "/etc/tandem/start-head.sh"
    assert script.index("KUBERAY_GEN_RAY_START_CMD") < script.index("tandem up --config")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/etc/tandem", "/dev/shm", "/models"}


@pytest.fixture
def head_pod(helm: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The head's start script, running, with stand-ins for `ray` and `tandem` that show what reached them."""
    data = render(helm)["ConfigMap", "test-tandem"]["data"]
    (tmp_path / "cluster.yaml").write_text(data["cluster.yaml"])
    script = data["start-head.sh"].replace("/etc/tandem", str(tmp_path)).replace("/tmp/tandem", str(tmp_path / "run"))
    programs = {
        "python": f'exec {sys.executable} "$@"',
        "ray": f'case $1 in start) touch {tmp_path}/up; exec sleep 60 ;; *) test -e {tmp_path}/up ;; esac',
        "tandem": f"exec {sys.executable} {tmp_path}/tandem.py",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tandem.py").write_text(
        "import pathlib, time\n"
        f"spec = pathlib.Path({str(tmp_path / 'run' / 'cluster.yaml')!r}).read_text()\n"
        "try:\n    print(spec, '---', sep='', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('clean', flush=True)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PATH": path, "POD_IP": POD_IP, "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block"},
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def spec_that_reached_tandem(head_pod: subprocess.Popen[str]) -> ClusterSpec:
    assert head_pod.stdout is not None
    lines = list(iter(head_pod.stdout.readline, "---\n"))
    return ClusterSpec.model_validate(yaml.safe_load("".join(lines)))


def test_the_start_script_gives_tandem_the_pods_address_and_a_clean_end(head_pod: subprocess.Popen[str]) -> None:
    assert spec_that_reached_tandem(head_pod).router.http_host == POD_IP
    head_pod.send_signal(signal.SIGINT)
    assert head_pod.wait(10) == 0


def test_the_head_pod_ends_when_ray_does(head_pod: subprocess.Popen[str]) -> None:
    spec_that_reached_tandem(head_pod)
    (ray,) = [child for child in psutil.Process(head_pod.pid).children(recursive=True) if child.name() == "sleep"]
    ray.terminate()
    assert head_pod.wait(10) == 0


def test_a_node_pod_has_all_its_devices_and_shared_memory_of_the_asked_size(helm: str) -> None:
    manifests = render(helm, "--values", str(CHART / "examples" / "gpu-node.yaml"))
    (group,) = manifests["RayCluster", "test-tandem"]["spec"]["workerGroupSpecs"]
    assert group["rayStartParams"] == {"num-gpus": "8"}
    for each in (group, head_of(manifests)):
        assert container_of(each)["resources"]["limits"]["nvidia.com/gpu"] == 8
        shared = next(v for v in each["template"]["spec"]["volumes"] if v["name"] == "shared-memory")
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_a_head_that_is_no_node_offers_ray_no_devices(helm: str) -> None:
    manifests = render(helm, "--set", "node.onHead=false", "--set", "node.replicas=2")
    params = head_of(manifests)["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    (group,) = manifests["RayCluster", "test-tandem"]["spec"]["workerGroupSpecs"]
    assert group["replicas"] == 2


def test_no_container_runs_as_root_or_writes_its_root_file_system(helm: str) -> None:
    manifests = render(helm, "--values", str(CHART / "examples" / "valkey.yaml"))
    cluster = manifests["RayCluster", "test-tandem"]["spec"]
    pods = [
        cluster["headGroupSpec"]["template"]["spec"],
        *(group["template"]["spec"] for group in cluster["workerGroupSpecs"]),
        manifests["Deployment", "test-tandem-valkey"]["spec"]["template"]["spec"],
        manifests["Pod", "test-tandem-test-completion"]["spec"],
    ]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_probes_ask_the_router(helm: str) -> None:
    container = container_of(head_of(render(helm, "--set", "startupSeconds=301")))
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 301


def test_services_select_the_head_pod_and_name_its_ports(helm: str) -> None:
    manifests = render(helm, "--set", "service.httpPort=80")
    head = head_of(manifests)
    labels = head["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container_of(head)["ports"]}
    for name, port, target in (("http", 80, 8000), ("grpc", 50051, 50051)):
        service = manifests["Service", f"test-tandem-{name}"]["spec"]
        assert service["selector"].items() <= labels.items()
        assert service["ports"][0]["port"] == port
        assert ports[service["ports"][0]["targetPort"]] == target


def test_only_http_and_grpc_are_open_to_other_pods(helm: str) -> None:
    policy = render(helm)["NetworkPolicy", "test-tandem"]["spec"]
    open_to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert [[port["port"] for port in rule["ports"]] for rule in open_to_all] == [["http", "grpc"]]


def test_secrets_come_by_reference_only(helm: str) -> None:
    manifests = render(helm, "--values", str(CHART / "examples" / "valkey.yaml"))
    assert not [kind for kind, _ in manifests if kind == "Secret"]
    env = {entry["name"]: entry for entry in container_of(head_of(manifests))["env"]}
    assert env["VALKEY_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "tandem-valkey", "key": "password"}
    assert "$(VALKEY_PASSWORD)" in env["TANDEM_REDIS_URL"]["value"]
    assert cluster_spec(manifests).redis.mode == "external"


def test_external_redis_takes_its_url_from_a_secret(helm: str) -> None:
    manifests = render(helm, "--values", str(CHART / "examples" / "external-redis.yaml"))
    env = {entry["name"]: entry for entry in container_of(head_of(manifests))["env"]}
    assert env["TANDEM_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "prefix-redis", "key": "url"}
    assert ("Deployment", "test-tandem-valkey") not in manifests


def test_a_model_given_as_a_path_is_not_pulled(helm: str) -> None:
    pulled = head_of(render(helm))["template"]["spec"]["initContainers"]
    assert [container["command"] for container in pulled] == [["tandem", "pull", "smollm2-135m"]]
    local = render(helm, "--set", "cluster.models[0].source=/models/mine")
    assert "initContainers" not in head_of(local)["template"]["spec"]


def test_a_changed_spec_changes_the_head_pod(helm: str) -> None:
    def checksum(*arguments: str) -> str:
        annotations = head_of(render(helm, *arguments))["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum() != checksum("--set", "cluster.log_level=debug")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("node.gpu=1", "gpu"),
        ("cluster.router.http_prt=1", "http_prt"),
        ("cluster.models[0].decode.workers=many", "/cluster/models/0/decode/workers"),
        ("cluster.log_level=loud", "/cluster/log_level"),
        ("redis.mode=valkey", "/redis/valkey/auth/existingSecret"),
        ("redis.mode=external", "/redis/external/existingSecret"),
        ("image.digest=latest", "/image/digest"),
        ("node.sharedMemory=lots", "/node/sharedMemory"),
        ("service.httpPort=0", "/service/httpPort"),
        ("cluster.redis.mode=none", "cluster.redis"),
        ("cluster.router.http_port=80", "cluster.router.http_port"),
        ("cluster.control.backend=subprocess", "cluster.control.backend"),
    ],
)
def test_a_wrong_value_fails_and_is_named(helm: str, setting: str, named: str) -> None:
    result = run_helm(helm, "template", "test", str(CHART), "--set", setting)
    assert result.returncode != 0
    assert named in result.stderr


def test_a_digest_wins_over_the_tag(helm: str) -> None:
    digest = "sha256:" + base64.b16encode(bytes(32)).decode().lower()
    container = container_of(head_of(render(helm, "--set", f"image.digest={digest}", "--set", "image.tag=x")))
    assert container["image"] == f"tandem@{digest}"
