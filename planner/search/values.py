"""A plan as values of the Helm chart; `cluster` has the schema of `tandem up --config`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from planner.devices import DeviceSpec
from planner.hardware import Hardware, RoleHardware
from planner.search.classes import UNLABELLED, classes_of
from planner.search.evaluate import ENGINE_BLOCK_TOKENS, router_spec
from planner.search.layout import ClusterLayout
from planner.search.machines import Machines
from planner.search.plan import Plan
from tandem.config.model import DEMO_MODEL, Role
from tandem.errors import InputError
from tandem.text.words import plural

MODEL_VOLUME = "/models"  # of the chart
REDIS_SECRET = "tandem-valkey"
HUB_SECRET = "tandem-hub-token"
HUB_MARGIN = 1.1  # over the weights: other files of a checkpoint, and the volume's overhead
CHART_NODES = 8  # node.maxReplicas of the chart, which node.replicas must not exceed
GPU_IMAGE = "tandem-cuda"
GPU_CORES = 4  # host cores per device, for routers and transfer agents too
GPU_HOST_GIB = 32  # host memory per device: weights pass through it while loading
GPU_START_S = 1800
PRODUCT_LABEL = "nvidia.com/gpu.product"  # of nodes, by NVIDIA's GPU feature discovery
CPU_RANK_GIB = 2  # of a rank, in addition to its weights and KV pool
MIB, GIB = 1 << 20, 1 << 30
_MEASURED = ("weights", "kv_dtype", "kernels", "batch_invariant", "threads_per_rank")  # and kept as profiled
_DTYPES = {2.0: "bfloat16", 4.0: "float32"}  # by bytes of an activation


def checked_source(source: str | None, model: str) -> str:
    """The checkpoint for the values file. Raises InputError if it is only the name of a model shape."""
    found = source or model
    if found.startswith("/") and not found.startswith(f"{MODEL_VOLUME}/"):
        raise InputError(
            f"--source: expected a folder below {MODEL_VOLUME}, where the chart mounts the volume, got {found}",
            field="--source",
        )
    if "/" in found or found == DEMO_MODEL:
        return found
    raise InputError(
        "--source: expected the checkpoint to serve, because --values was given: a hub name "
        f"(meta-llama/Llama-3.1-70B-Instruct) or a folder in the pods (/models/llama-3-70b); "
        f"{found!r} is only a shape",
        field="--source",
    )


def check_values(hardware: RoleHardware) -> None:
    """Raises InputError if no values file can deploy plans on this hardware."""
    for role in Role:
        formats(hardware.of(role))
        speculation(hardware.of(role))
    if hardware.is_mixed:
        for role in Role:
            node_selector(hardware.of(role).device)


def node_selector(device: DeviceSpec) -> dict[str, str]:
    """Raises InputError if the device file has no label."""
    if device.gpu_product is None:
        raise InputError(
            f"--values: {device.name}: gpu_product: expected the label {PRODUCT_LABEL} of nodes with this device "
            "in its file, because workers of each role go to nodes of their device; got none",
            field="gpu_product",
        )
    return {PRODUCT_LABEL: device.gpu_product}


def describe_machines(plan: Plan) -> str | None:
    """The devices deployed beyond the plan and their cost; None if there are none."""
    if plan.chosen is None:
        return None
    layout, kinds = plan.chosen.layout, plan.machines
    deployed = kinds.deployed(layout)
    if deployed.devices == layout.devices:
        return None
    names = [f" {kinds.of_role(role).device}" for role in Role] if kinds.is_mixed else [""]
    places = " and ".join(
        f"{plural(each.count, 'machine')} of {each.devices}{name}"
        for each, name in zip(kinds.machines(layout), names, strict=True)
    )
    return (
        f"deployed on {places}: {plural(deployed.devices, 'device')}, ${deployed.per_hour:.2f} per hour, "
        f"{deployed.devices - layout.devices} of them without a worker"
    )


def helm_values(plan: Plan, hardware: RoleHardware, source: str, labels: Sequence[tuple[str, str]] = UNLABELLED) -> str:
    """Returns YAML. `source`: the checkpoint to serve. `labels`: of the trace. Raises InputError when the plan chose no
    layout."""
    if plan.chosen is None:
        raise InputError("--values: expected a plan to deploy, but no layout meets the objectives", field="--values")
    layout, decode = plan.chosen.layout, hardware.of(Role.DECODE)
    router = router_spec(layout, classes_of(labels, plan.goal.slo, refuses=True))
    cluster: dict[str, Any] = {
        "name": "planned",
        "models": [
            {
                "source": source,
                "prefill": {
                    "workers": layout.prefill_workers,
                    "tp": layout.prefill_tp,
                    **_own_engine(layout, hardware),
                },
                "decode": {"workers": layout.decode_workers, "tp": layout.decode_tp},
                "engine": {
                    "device": decode.device.kind,
                    **formats(decode),
                    **speculation(decode),
                    "block_tokens": ENGINE_BLOCK_TOKENS,
                    "kv_memory_bytes": int(decode.kv_rank_bytes(layout.decode_tp)),
                    "max_running_requests": plan.goal.max_running_requests,
                    "max_step_tokens": layout.step_tokens,
                    **({} if (longest_s := plan.goal.longest_step_s) is None else {"longest_step_s": longest_s}),
                },
            }
        ],
        **({} if plan.deployed(layout).machines == 1 else {"security": {"allow_plaintext": True}}),
        "router": {
            "max_prefill_tokens_in_flight": router.max_prefill_tokens_in_flight,
            "max_queued_requests": router.max_queued_requests,
            "classes": [each.model_dump(mode="json", exclude_defaults=True) for each in router.classes],
        },
    }
    values = {"cluster": cluster, **_models(source, decode), **_pods(plan.machines.machines(layout), hardware)}
    return "".join(f"# {line}\n" for line in _head(plan, hardware, source)) + yaml.safe_dump(values, sort_keys=False)


def _own_engine(layout: ClusterLayout, hardware: RoleHardware) -> dict[str, Any]:
    """What prefill workers have of their own: KV memory, because more ranks hold less of the weights each and devices
    differ, and the format in which their device serves weights."""
    if layout.is_aggregated:
        return {}
    prefill, decode = hardware.of(Role.PREFILL), hardware.of(Role.DECODE)
    own, others = (
        {"kv_memory_bytes": int(each.kv_rank_bytes(tp)), **formats(each)}
        for each, tp in ((prefill, layout.prefill_tp), (decode, layout.decode_tp))
    )
    engine = {name: value for name, value in own.items() if value != others.get(name)}
    return {"engine": engine} if engine else {}


def formats(hardware: Hardware) -> dict[str, Any]:
    """Engine settings for elements of these sizes, or those that the step times were measured with. Raises InputError
    for those that no engine serves."""
    shape, device = hardware.model.shape, hardware.device
    if hardware.model.gap is not None:
        raise InputError(
            f"--values: Tandem's engine does not serve {hardware.model.name} (it lacks {hardware.model.gap}): "
            "plan without",
            field="--values",
        )
    if (profiled := hardware.profiled) is not None and (engine := profiled.engine) is not None:
        if engine.kind != "tandem":
            raise InputError(
                f"--values: expected step times of Tandem's own engine, got {profiled.file} of engine.kind "
                f"{engine.kind}: plan without --values",
                field="--values",
            )
        measured = engine.model_dump(include={*_MEASURED}, exclude_defaults=True)
        return {"dtype": engine.dtype, **measured}
    wide = shape.activation_bytes
    if wide not in _DTYPES:
        raise InputError(
            f"--values: {device.name}: element_bytes: expected 2 (bfloat16) or 4 (float32), got {wide:g}",
            field="element_bytes",
        )
    weights = {wide: "dense", 1.0: device.eight_bit_weights} | ({0.625: "int4"} if device.kind == "cpu" else {})
    kv = {wide: "auto", 1.0: "fp8"}
    of_experts = shape.experts.weight_bytes if shape.experts else shape.weight_bytes
    for option, of, known, size in (
        ("--element-bytes", "weights", weights, shape.weight_bytes),
        ("--expert-bytes", "experts", {shape.weight_bytes}, of_experts),
        ("--kv-bytes", "KV", kv, shape.kv_bytes),
    ):
        if size not in known:
            sizes = " or ".join(f"{each:g}" for each in known)
            raise InputError(
                f"{option}: expected {of} of {sizes} bytes an element for --values, which Tandem serves on "
                f"{device.name}, got {size:g}",
                field=option,
            )
    found = {"dtype": _DTYPES[wide], "weights": weights[shape.weight_bytes], "kv_dtype": kv[shape.kv_bytes]}
    return {name: value for name, value in found.items() if value not in ("dense", "auto")}


def speculation(hardware: Hardware) -> dict[str, Any]:
    """Engine settings of the speculation that a plan counts on, as it was profiled. Raises InputError for one of which
    only the acceptance is known."""
    if hardware.acceptance is None:
        return {}
    engine = None if hardware.profiled is None else hardware.profiled.engine
    if engine is None or engine.speculation == "none":
        raise InputError(
            "--values: expected to know how the tokens are proposed that the plan counts on, got their acceptance "
            "only: give --cost a file of `tandem profile` with engine.speculation, or leave out one of both options",
            field="--values",
        )
    drafter = engine.speculation_model
    if drafter is not None and drafter.startswith(("/", ".")) and not drafter.startswith(f"{MODEL_VOLUME}/"):
        raise InputError(
            f"--values: engine.speculation_model: expected a folder below {MODEL_VOLUME}, where the chart mounts the "
            f"volume, got {drafter}: profile with such a path, or plan without --values",
            field="--values",
        )
    settings = engine.model_dump(exclude_defaults=True).items()
    found = {name: value for name, value in settings if name.startswith("speculation")}
    return found | {"speculation_tokens": hardware.acceptance.tokens}


def _stored_bytes(hardware: Hardware) -> float:
    """Bytes of the checkpoint: at least two per parameter, also if it is served with fewer."""
    return hardware.model.resident_params * max(2.0, hardware.model.shape.weight_bytes)


def _head(plan: Plan, hardware: RoleHardware, source: str) -> Iterator[str]:
    """Comment lines: the plan, its whole machines, and what must exist before installation."""
    assert plan.chosen is not None
    layout, decode = plan.chosen.layout, hardware.of(Role.DECODE)
    device, machines, per_hour = decode.device, plan.machines.machines(layout), plan.per_hour(layout)
    yield f"Planned by `tandem plan` for {plan.model} on {layout.devices} x {plan.device}, ${per_hour:.2f} per hour:"
    yield f"{layout}; {plan.chosen.joint:.1%} of the simulated requests met their objectives."
    if (more := describe_machines(plan)) is not None:
        yield f"It is {more}."
    if plan.machines.is_mixed:
        yield f"By the node label {PRODUCT_LABEL} (node.nodeSelector, nodeGroups[0].nodeSelector),"
        products = [f"{role} workers are on {hardware.of(role).device.gpu_product}" for role in Role]
        yield f"{' and '.join(products)}."
    if plan.deployed(layout).machines > 1:
        yield f"Needs a Secret: kubectl create secret generic {REDIS_SECRET} --from-literal=password=..."
        yield "Ports between pods are not encrypted (allow_plaintext): nccl and nixl cannot be. With tls.internal, KV"
        yield "blocks take tcp between machines, which the plan did not assume."
        if device.kind == "cuda":
            own = ",nodeGroups[0].rdma.resource=RESOURCE" if len({each.devices for each in machines}) > 1 else ""
            yield f"Needs RDMA: --set node.rdma.resource=RESOURCE{own} and an image with NIXL (docs/deploy.md):"
            yield f"the plan moves KV between pods at {device.link.bytes_per_s / 1e9:g} GB/s for each device."
            yield "Without RDMA, KV shares the pods' network: plan again with its speed as `link` in a device file."
    if source.startswith("/"):
        yield f"Needs a volume with {source}: --set models.existingClaim=CLAIM (or models.hostPath)"
    elif source != DEMO_MODEL:
        yield f"Needs a Secret: kubectl create secret generic {HUB_SECRET} --from-literal=token=..."
        yield "(omit models.hubTokenSecret for a model that is not gated)."
        yield f"Each pod pulls {_stored_bytes(decode) / 1e9:.0f} GB into a volume of its own;"
        yield "--set models.existingClaim=CLAIM (ReadWriteMany) keeps them."


def _models(source: str, hardware: Hardware) -> dict[str, Any]:
    """The size of the weights; for those from a hub their volume, and the token for gated ones."""
    if source == DEMO_MODEL:  # the chart knows it
        return {}
    stored = _stored_bytes(hardware)
    weight_bytes = round(stored / hardware.model.resident_params)
    size = {"size": f"{math.ceil(stored / MIB)}Mi", **({} if weight_bytes == 2 else {"bytesPerWeight": weight_bytes})}
    models: dict[str, Any] = {"weights": {source: size}}
    if not source.startswith("/"):
        models |= {
            "emptyDirSize": f"{math.ceil(stored * HUB_MARGIN / GIB) + 1}Gi",
            "hubTokenSecret": {"name": HUB_SECRET},
        }
    return {"models": models}


def _pods(machines: Sequence[Machines], hardware: RoleHardware) -> dict[str, Any]:
    """One pod per machine, sized for its workers. Of two kinds, prefill workers go to `node`, with the head pod, and
    decode workers to a group of their own."""
    first, device = machines[0], hardware.of(Role.PREFILL).device
    is_alone = len(machines) == 1 and first.count == 1
    node: dict[str, Any] = {"replicas": first.count - 1}
    if first.count - 1 > CHART_NODES:
        node["maxReplicas"] = first.count - 1
    threads = formats(hardware.of(Role.PREFILL)).get("threads_per_rank", 1)
    node |= _pod(first, device, threads, is_alone=is_alone)
    values: dict[str, Any] = {"node": node}
    if device.kind == "cuda":
        values |= {"image": {"repository": GPU_IMAGE}, "startupSeconds": GPU_START_S}
    if hardware.is_mixed:
        _, second = machines
        decode = hardware.of(Role.DECODE).device
        values["node"] = {"roles": [Role.PREFILL.value], **node, "nodeSelector": node_selector(device)}
        group = {"name": "decode", "roles": [Role.DECODE.value], "replicas": second.count}
        if second.devices != first.devices:  # else as in `node`, so that one --set is for both
            group |= _pod(second, decode, threads, is_alone=False)
        values["nodeGroups"] = [{**group, "nodeSelector": node_selector(decode)}]
    if not is_alone:  # only the head pod can reach an embedded Redis
        values["redis"] = {"mode": "valkey", "valkey": {"auth": {"existingSecret": REDIS_SECRET}}}
    return values


def _pod(machines: Machines, device: DeviceSpec, threads: int, *, is_alone: bool) -> dict[str, Any]:
    """What each of these machines gives to its pod. `threads`: of a rank on a CPU."""
    ranks = machines.devices
    pod: dict[str, Any] = {}
    if device.kind == "cpu":
        cores, memory_gib = ranks * threads, math.ceil(ranks * (device.memory_bytes / GIB + CPU_RANK_GIB))
    else:
        pod["gpus"] = ranks
        if not is_alone:
            pod["rdma"] = {"count": ranks}  # a NIC for each device, as the device files have
        cores, memory_gib = ranks * GPU_CORES, ranks * GPU_HOST_GIB
    amount = {"memory": f"{memory_gib}Gi"}
    pod["resources"] = {"requests": {"cpu": str(cores), **amount}, "limits": amount}
    return pod
