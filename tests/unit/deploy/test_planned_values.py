"""What `tandem plan --values` writes is rendered by the real helm, with nothing given but what its head asks for."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import planner.devices
from cluster.cli.commands.planning.plan import show
from planner.devices import find_device
from planner.hardware import Hardware, MixedHardware
from planner.models import ElementSizes, find_model
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKind, MachineKinds, Machines
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.values import check_values, checked_source, describe_machines, helm_values
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import InputError
from tests.unit.deploy.test_chart import cluster_spec


def planned(
    layout: ClusterLayout, model: str, device: str, element_bytes: float | None = None
) -> tuple[Plan, Hardware]:
    """A plan that came to `layout`."""
    spec = find_device(device)
    size = element_bytes or spec.element_bytes
    hardware = Hardware(find_model(model, ElementSizes(size, size, spec.element_bytes)), spec)
    traffic = synthetic_trace(60, Gamma(0.1), LengthSpec(50, 0.1, 100), LengthSpec(5, 0.1, 10), seed=1)
    goal = Goal(Slo(ttft_s=100.0), max_devices=max(hardware.widths()[0], 1), step_tokens=(2048,))
    plan = make_plan(traffic, hardware, goal, SearchOptions(requests=50))
    assert plan.chosen is not None
    return replace(plan, chosen=replace(plan.chosen, job=replace(plan.chosen.job, layout=layout))), hardware


@pytest.mark.parametrize(
    ("layout", "model", "device", "source", "pods"),
    [
        (ClusterLayout(2, 4, 1, 4, 2048), "llama-3-70b", "h100", "/models/llama-3-70b", 2),
        (ClusterLayout(1, 1, 2, 1, 2048), "llama-3-8b", "h100", "meta-llama/Llama-3.1-8B-Instruct", 1),
        (ClusterLayout(0, 1, 1, 1, 2048), "smollm2-135m", "cpu", "smollm2-135m", 1),
        (ClusterLayout(0, 1, 10, 8, 2048), "llama-3-70b", "h100", "/models/llama-3-70b", 10),
    ],
)
def test_planned_values_render_as_they_are(
    layout: ClusterLayout, model: str, device: str, source: str, pods: int, render: Callable[..., Any], tmp_path: Path
) -> None:
    plan, hardware = planned(layout, model, device)
    path = tmp_path / "plan.yaml"
    path.write_text(helm_values(plan, hardware, checked_source(source, model)))
    manifests = render("-f", str(path), *(["--set", "models.existingClaim=weights"] if source.startswith("/") else []))
    cluster = manifests["RayCluster", "test-tandem"]["spec"]
    assert 1 + sum(group["replicas"] for group in cluster.get("workerGroupSpecs", ())) == pods
    pod = cluster["headGroupSpec"]["template"]["spec"]
    containers = [container["name"] for container in pod.get("initContainers", ())]
    assert any(name.startswith("pull-model") for name in containers) == (not source.startswith("/"))
    main = pod["containers"][0]
    assert main["image"].split(":")[0].endswith("tandem" if device == "cpu" else "tandem-cuda")
    assert main["resources"]["limits"].get("nvidia.com/gpu", 0) == (0 if device == "cpu" else min(8, layout.devices))
    assert (("Deployment", "test-tandem-valkey") in manifests) == (pods > 1)


@pytest.mark.parametrize(("device", "weights"), [("h100", "fp8"), ("cpu", "int8")])
def test_a_plan_of_one_byte_an_element_is_served_in_as_many(device: str, weights: str) -> None:
    plan, hardware = planned(ClusterLayout(1, 1, 1, 1, 2048), "llama-3-8b", device, element_bytes=1.0)
    text = helm_values(plan, hardware, "meta-llama/Llama-3.1-8B-Instruct")
    engine = yaml.safe_load(text)["cluster"]["models"][0]["engine"]
    assert (engine["weights"], engine["kv_dtype"]) == (weights, "fp8")
    assert "# Each pod pulls 16 GB" in text, "the checkpoint is no smaller"
    wider = yaml.safe_load(helm_values(*planned(ClusterLayout(1, 1, 1, 1, 2048), "llama-3-8b", "h100"), "/models/m"))
    assert not {"weights", "kv_dtype"} & wider["cluster"]["models"][0]["engine"].keys()


def test_weights_from_a_hub_find_room_and_a_token_for_them(render: Callable[..., Any], tmp_path: Path) -> None:
    plan, hardware = planned(ClusterLayout(2, 4, 1, 4, 2048), "llama-3-70b", "h100")
    text = helm_values(plan, hardware, "meta-llama/Llama-3.1-70B-Instruct")
    assert "# Needs a Secret: kubectl create secret generic tandem-hub-token --from-literal=token=..." in text
    assert "# Each pod pulls 141 GB" in text
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    manifests = render("-f", str(path))
    pod = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "models"]
    assert volume["emptyDir"] == {"sizeLimit": "146Gi"}
    assert 141e9 < 146 << 30
    told = yaml.safe_load(text)["models"]["weights"]["meta-llama/Llama-3.1-70B-Instruct"]["size"]
    assert 0 <= int(told.removesuffix("Mi")) * (1 << 20) - 141e9 < 1e9
    promised = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["requirements.yaml"])
    assert {"Secret tandem-hub-token with token", "Secret tandem-valkey with password"} == {
        each["what"] for each in promised
    }


def test_the_link_of_the_plan_is_reserved_where_pods_would_share_a_slower_one(
    render: Callable[..., Any], tmp_path: Path
) -> None:
    plan, hardware = planned(ClusterLayout(2, 4, 1, 4, 2048), "llama-3-70b", "h100")
    text = helm_values(plan, hardware, "/models/llama-3-70b")
    assert "# Needs RDMA: --set node.rdma.resource=RESOURCE and an image with NIXL" in text
    assert "# the plan moves KV between pods at 50 GB/s for each device.\n" in text
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    extra = "node.rdma.resource=rdma/hca,cluster.transfer.transport=nixl,models.existingClaim=weights"
    group = render("-f", str(path), "--set", extra)["RayCluster", "test-tandem"]["spec"]["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca"] == limits["nvidia.com/gpu"] == 8
    alone = helm_values(*planned(ClusterLayout(1, 1, 2, 1, 2048), "llama-3-8b", "h100"), "/models/m")
    assert "rdma" not in alone.lower(), "one pod's KV moves by CUDA IPC"


@pytest.mark.parametrize("source", ["/models/llama-3-8b", "smollm2-135m"])
def test_a_model_that_no_hub_brings_wants_no_token(source: str) -> None:
    plan, hardware = planned(ClusterLayout(1, 1, 2, 1, 2048), "llama-3-8b", "h100")
    text = helm_values(plan, hardware, source)
    models = yaml.safe_load(text).get("models", {})
    assert models == ({"weights": {source: {"size": "15316Mi"}}} if source.startswith("/") else {})
    assert ("--set models.existingClaim" in text) == source.startswith("/")


@pytest.mark.parametrize(
    ("layout", "devices_per_node", "machines"),
    [
        (ClusterLayout(1, 1, 2, 1, 2048), 8, Machines(1, 3)),
        (ClusterLayout(0, 1, 1, 8, 2048), 8, Machines(1, 8)),
        (ClusterLayout(2, 4, 1, 4, 2048), 8, Machines(2, 8)),
        (ClusterLayout(8, 1, 1, 8, 2048), 8, Machines(2, 8)),
        (ClusterLayout(3, 3, 2, 3, 2048), 8, Machines(3, 8)),  # two of three ranks to a machine
        (ClusterLayout(2, 6, 2, 2, 2048), 8, Machines(2, 8)),
    ],
)
def test_as_few_whole_machines_as_hold_every_worker(
    layout: ClusterLayout, devices_per_node: int, machines: Machines
) -> None:
    kind = MachineKind("h100", 3.0, devices_per_node)
    assert MachineKinds(kind, kind).machines(layout) == (machines,)


def test_what_is_deployed_beyond_the_plan_is_said_with_its_price() -> None:
    plan, hardware = planned(ClusterLayout(2, 4, 1, 4, 2048), "llama-3-70b", "h100")
    said = "deployed on 2 machines of 8: 16 devices, $48.00 per hour, 4 of them without a worker"
    assert describe_machines(plan) == said
    assert f"# It is {said}.\n" in helm_values(plan, hardware, "/models/llama-3-70b")
    shown = io.StringIO()
    screen = Console(file=shown, width=120)
    show(plan, "roofline", said, screen)
    assert said in shown.getvalue()
    assert plan.chosen is not None
    beside = replace(plan, finalists=(plan.chosen,), same_price=plan.chosen)
    show(beside, "roofline", None, screen)
    assert "│ 16, $48.00 │" in shown.getvalue()
    assert str(beside.same_price_note()) in " ".join(shown.getvalue().split())
    whole, _ = planned(ClusterLayout(2, 4, 2, 4, 2048), "llama-3-70b", "h100")
    assert describe_machines(whole) is None


def test_the_name_of_a_shape_is_no_checkpoint() -> None:
    with pytest.raises(InputError, match=r"--source: expected the checkpoint to serve, .* 'llama-3-70b' is only"):
        checked_source(None, "llama-3-70b")
    assert checked_source(None, "smollm2-135m") == "smollm2-135m"
    with pytest.raises(InputError, match="below /models"):
        checked_source(None, "/data/llama")
    assert checked_source(None, "meta-llama/Llama-3-70B") == "meta-llama/Llama-3-70B"


def mixed_values(
    layout: ClusterLayout, prefill: str, decode: str, element_bytes: float = 2.0, decode_per_node: int = 8
) -> tuple[Plan, str]:
    """Of a plan that came to `layout` with a device for each role."""
    plan, _ = planned(layout, "llama-3-8b", decode, element_bytes)
    model = find_model("llama-3-8b", ElementSizes(element_bytes, element_bytes))
    sizes = ((prefill, 8), (decode, decode_per_node))
    devices = (find_device(name).model_copy(update={"devices_per_node": size}) for name, size in sizes)
    pair = MixedHardware.pair(*(Hardware(model, each) for each in devices))
    plan = replace(plan, machines=MachineKinds.of(pair))
    return plan, helm_values(plan, pair, "/models/llama-3-8b")


@pytest.mark.parametrize(
    ("layout", "gpus", "pods"),
    [
        (ClusterLayout(2, 1, 1, 1, 2048), (8, 8), (1, 1)),
        (ClusterLayout(5, 2, 3, 4, 2048), (8, 8), (2, 2)),
        (ClusterLayout(2, 1, 3, 8, 2048), (8, 8), (1, 3)),
        (ClusterLayout(10, 8, 11, 8, 2048), (8, 8), (10, 11)),
    ],
)
def test_workers_of_each_role_go_to_nodes_of_their_device(
    layout: ClusterLayout, gpus: tuple[int, int], pods: tuple[int, int], render: Callable[..., Any], tmp_path: Path
) -> None:
    plan, text = mixed_values(layout, "h100", "h200")
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    manifests = render("-f", str(path), "--set", "models.existingClaim=weights")
    cluster = manifests["RayCluster", "test-tandem"]["spec"]
    groups = {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
    head, nodes, decode = cluster["headGroupSpec"], groups["nodes"], groups["decode"]
    assert (1 + nodes["replicas"], decode["replicas"]) == pods
    for group, count, product in (
        (head, gpus[0], "NVIDIA-H100-80GB-HBM3"),
        (nodes, gpus[0], "NVIDIA-H100-80GB-HBM3"),
        (decode, gpus[1], "NVIDIA-H200"),
    ):
        pod = group["template"]["spec"]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": product}
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == count
    (model,) = cluster_spec(manifests).models
    assert [model.pool(role).node_groups for role in Role] == [("nodes",), ("decode",)]
    assert not model.can_change_roles
    of_role = {
        role: int(Hardware(find_model("llama-3-8b"), find_device(device)).kv_rank_bytes(tp))
        for (role, tp), device in zip(layout.widths, ("h100", "h200"), strict=True)
    }
    assert {role: model.engine_of(role).kv_memory_bytes for role in Role} == of_role
    more = describe_machines(plan)
    assert f"on {layout.devices} x h100:h200, ${plan.per_hour(layout):.2f} per hour:" in text
    assert more is None or f"# It is {more}.\n" in text


@pytest.mark.parametrize("decode_per_node", [8, 4])
def test_the_head_says_how_each_group_gets_its_nics(
    decode_per_node: int, render: Callable[..., Any], tmp_path: Path
) -> None:
    """A group of other pods has `rdma` of its own."""
    _, text = mixed_values(ClusterLayout(2, 1, 1, 1, 2048), "h100", "a100", decode_per_node=decode_per_node)
    assert "# the plan moves KV between pods at 25 GB/s for each device.\n" in text, "the slower link"
    (told,) = re.findall(r"--set (node\.rdma\S+)", text)
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    extra = f"{told.replace('RESOURCE', 'rdma/hca')},models.existingClaim=weights,cluster.transfer.transport=nixl"
    cluster = render("-f", str(path), "--set", extra)["RayCluster", "test-tandem"]["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["rdma/hca"] == limits["nvidia.com/gpu"]


def test_each_role_serves_weights_in_a_format_of_its_device() -> None:
    _, text = mixed_values(ClusterLayout(1, 1, 1, 1, 2048), "a100", "h100", element_bytes=1.0)
    model = ClusterSpec.model_validate(yaml.safe_load(text)["cluster"]).models[0]
    assert [(model.engine_of(role).weights, model.engine_of(role).kv_dtype) for role in Role] == [
        ("int8", "fp8"),
        ("fp8", "fp8"),
    ]


def test_the_classes_of_the_trace_are_deployed_with_the_objectives(render: Callable[..., Any], tmp_path: Path) -> None:
    plan, hardware = planned(ClusterLayout(1, 1, 2, 1, 2048), "llama-3-8b", "h100")
    slo = Slo(2.0, 0.1, (("batch", Slo(60.0)),))
    plan = replace(plan, goal=replace(plan.goal, slo=slo))
    path = tmp_path / "plan.yaml"
    path.write_text(helm_values(plan, hardware, "/models/m", (("chat", ""), ("batch", "a"))))
    router = cluster_spec(render("-f", str(path), "--set", "models.existingClaim=weights")).router
    assert [(each.name, each.ttft_slo_s, each.tpot_slo_s, each.batch) for each in router.classes] == [
        ("chat", 2.0, 0.1, False),
        ("batch", 60.0, None, True),
    ]


def test_a_cpu_of_any_name_has_the_pods_of_cpus(tmp_path: Path) -> None:
    text = (Path(planner.devices.__file__).parent / "cpu.yaml").read_text()
    mine = tmp_path / "epyc.yaml"
    mine.write_text(text.replace("name: cpu\n", "name: epyc\n"))
    found = yaml.safe_load(helm_values(*planned(ClusterLayout(1, 1, 1, 1, 2048), "smollm2-135m", str(mine)), "org/m"))
    engine = found["cluster"]["models"][0]["engine"]
    assert (engine["device"], engine["dtype"]) == ("cpu", "float32")
    assert "gpus" not in found["node"]
    assert found["node"]["resources"]["requests"]["cpu"] == "2"
    assert "image" not in found
    mine.write_text(text.replace("element_bytes: 4\n", "element_bytes: 1\n"))
    odd = find_device(str(mine))
    with pytest.raises(InputError, match=r"cpu: element_bytes: expected 2 \(bfloat16\) or 4 \(float32\), got 1"):
        check_values(Hardware(find_model("smollm2-135m", ElementSizes(activations=odd.element_bytes)), odd))


def test_without_a_label_of_its_nodes_a_device_has_no_values() -> None:
    mine = find_device("h200").model_copy(update={"name": "mine", "gpu_product": None})
    of_mine, of_h100 = (Hardware(find_model("llama-3-8b"), each) for each in (mine, find_device("h100")))
    check_values(of_mine)
    with pytest.raises(InputError, match=r"--values: mine: gpu_product: expected the label nvidia\.com/gpu\.product"):
        check_values(MixedHardware.pair(of_h100, of_mine))
