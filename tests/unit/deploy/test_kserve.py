"""KServe's runtime: objects that KServe takes, and a container whose very command serves a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.spec.resolve import free_ports
from tandem.config.spec import ClusterSpec
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tandem.testing.models import write_tiny_llama

ROOT = Path(__file__).resolve().parents[3]
KSERVE = ROOT / "deploy" / "kserve"
SCHEMAS = yaml.safe_load((ROOT / "tests" / "data" / "kserve.schema.yaml").read_text())
RUNTIME = yaml.safe_load((KSERVE / "serving-runtime.yaml").read_text())
SERVICES = list(yaml.safe_load_all((KSERVE / "inference-service.yaml").read_text()))
START_S = 300

Manifest = dict[str, Any]


def container_of(service: Manifest) -> Manifest:
    """As KServe merges it: the service's fields over the runtime's, but its args after those."""
    (merged,) = (dict(each) for each in RUNTIME["spec"]["containers"])
    model = service["spec"]["predictor"]["model"]
    merged |= {key: model[key] for key in ("image", "resources") if key in model}
    merged["args"] = [*merged["args"], *model.get("args", [])]
    return json.loads(json.dumps(merged).replace("{{.Name}}", service["metadata"]["name"]))  # type: ignore[no-any-return]


def pod_of(service: Manifest) -> Manifest:
    spec = {"containers": [container_of(service)], "volumes": RUNTIME["spec"]["volumes"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "test"}, "spec": spec}


@pytest.mark.parametrize("manifest", [RUNTIME, *SERVICES], ids=lambda each: each["metadata"]["name"])
def test_kserve_knows_every_field(manifest: Manifest) -> None:
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])


@pytest.mark.parametrize("service", SERVICES, ids=lambda each: each["metadata"]["name"])
def test_a_service_names_the_runtime_and_becomes_a_pod(service: Manifest) -> None:
    spec, model = RUNTIME["spec"], service["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in spec["supportedModelFormats"]}
    assert model["protocolVersion"] in spec["protocolVersions"]
    mode = service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
    assert mode == "RawDeployment", "the runtime listens on the pod's address, and on two ports"
    pod = pod_of(service)
    kubernetes_validate.validate(pod, "1.37", strict=True)
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "kserve-container", "KServe mounts the model there"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    ports = {each["containerPort"] for each in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")]
    assert {*probes, int(spec["annotations"]["prometheus.kserve.io/port"])} <= ports
    assert f"--http-port={container['ports'][0]['containerPort']}" in container["args"], "the Service's port 80"


def test_the_runtime_may_do_as_little_as_the_charts_pods(render: Any) -> None:
    manifests = render()
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]
    own = container_of(SERVICES[0])["securityContext"]
    pod = head["securityContext"]
    wanted = head["containers"][0]["securityContext"] | {
        key: pod[key] for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile")
    }
    assert own == wanted


def started(container: Manifest, folder: Path, model: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    """The container as a process: other ports, and folders in the place of its mounts."""
    places = {"$(POD_IP)": "127.0.0.1", "/mnt/models": str(model), "/home/tandem": str(folder)}
    places["/dev/termination-log"] = str(folder / "termination-log")
    places |= {f"={port}": f"={ours}" for port, ours in ports.items()}

    def here(text: str) -> str:
        for place, ours in places.items():
            text = text.replace(place, ours)
        return text

    (program,) = container["command"]
    command = [str(Path(sys.executable).with_name(program)), *map(here, container["args"])]
    environment = {each["name"]: here(each["value"]) for each in container["env"] if "value" in each}
    environment |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)


def answer(url: str, body: Manifest | None = None) -> Manifest:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Manifest, dict[str, int], Path]]:
    """The first service, ready by its own probe: (container, our port for each of its own, the model's folder)."""
    folder, model = tmp_path_factory.mktemp("kserve"), tmp_path_factory.mktemp("models")
    write_tiny_llama(model)
    container = container_of(SERVICES[0])
    names = [str(each["containerPort"]) for each in container["ports"]]
    ports = dict(zip(names, free_ports(*len(names) * ["127.0.0.1"]), strict=True))
    probe = container["readinessProbe"]["httpGet"]
    with ExitStack() as stack:
        process = started(container, folder, model, ports)
        stack.callback(process.kill)  # does nothing to one that has ended
        deadline = time.monotonic() + START_S
        while True:
            try:
                answer(f"http://127.0.0.1:{ports[str(probe['port'])]}{probe['path']}")
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
        yield container, ports, model
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.e2e
def test_the_containers_command_serves_the_model_over_both_ports(served: tuple[Manifest, dict[str, int], Path]) -> None:
    container, ports, model = served
    before = {path.name for path in model.iterdir()}
    url = f"http://127.0.0.1:{ports['8080']}"
    name = SERVICES[0]["metadata"]["name"]
    reply = answer(f"{url}/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 4})
    assert reply["usage"]["completion_tokens"] > 0
    answer(url + container["livenessProbe"]["httpGet"]["path"])
    with grpc.insecure_channel(f"127.0.0.1:{ports['9000']}") as channel:
        assert GRPCInferenceServiceStub(channel).ModelReady(oip.ModelReadyRequest(name=name)).ready
    assert {path.name for path in model.iterdir()} == before, "KServe mounts it read-only"


def test_its_variables_and_options_are_keys_of_the_spec() -> None:
    for service in SERVICES:
        container = container_of(service)
        names = [each["name"] for each in container["env"]]
        paths = [name.removeprefix("TANDEM_").lower().split("__") for name in names if "__" in name]
        paths += [
            arg.removeprefix("--set=").partition("=")[0].split(".") for arg in container["args"] if "--set=" in arg
        ]
        assert len(paths) >= 3
        for path in paths:
            found: Any = json.loads(ClusterSpec().model_dump_json())
            for key in path:
                found = found[int(key) if isinstance(found, list) else key]
