"""A plan as values of the Helm chart: `cluster` is the very schema of `tandem up --config`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from planner.devices import DeviceSpec
from planner.hardware import Hardware
from planner.search.evaluate import ENGINE_BLOCK_TOKENS, router_spec
from planner.search.layout import ClusterLayout
from planner.search.plan import Plan
from tandem.config.spec import DEMO_MODEL
from tandem.errors import InputError
from tandem.text.words import plural

MODEL_VOLUME = "/models"  # of the chart
REDIS_SECRET = "tandem-valkey"
HUB_SECRET = "tandem-hub-token"
HUB_MARGIN = 1.1  # of the weights: the other files of a checkpoint, and the volume's own
GPU_IMAGE = "tandem-cuda"
GPU_CORES = 4  # of the host for each device, with routers and transfer agents
GPU_HOST_GIB = 32  # for each device: weights on their way
GPU_START_S = 1800
CPU_RANK_GIB = 2  # of a rank, beside its weights and KV pool
GIB = 1 << 30


def checked_source(source: str | None, model: str) -> str:
    """What the values file serves. Raises InputError when that is only the name of a shape."""
    found = source or model
    if found.startswith("/") and not found.startswith(f"{MODEL_VOLUME}/"):
        raise InputError(
            f"--source: expected a folder below {MODEL_VOLUME}, where the chart mounts the volume, got {found}",
            field="--source",
        )
    if "/" in found or found == DEMO_MODEL:
        return found
    raise InputError(
        f"--source: expected with --values the checkpoint to serve, for {found!r} is only a shape: a hub name "
        "(meta-llama/Meta-Llama-3-70B-Instruct) or a folder in the pods (/models/llama-3-70b)",
        field="--source",
    )


@dataclass(frozen=True, slots=True)
class Machines:
    """What a layout is deployed on: machines are whole, so they may have more devices than were planned."""

    count: int
    devices: int  # of each

    @classmethod
    def of(cls, layout: ClusterLayout, device: DeviceSpec) -> Machines:
        """As few as hold every worker, for the ranks of one share a machine."""
        widths = [layout.prefill_tp] * layout.prefill_workers + [layout.decode_tp] * layout.decode_workers
        free: list[int] = []
        for width in sorted(widths, reverse=True):
            place = next((at for at, left in enumerate(free) if left >= width), None)
            if place is None:
                free.append(device.devices_per_node - width)
            else:
                free[place] -= width
        return cls(len(free), device.devices_per_node if len(free) > 1 else layout.devices)


def describe_machines(plan: Plan, device: DeviceSpec) -> str | None:
    """What is deployed beyond the plan, and what it costs; None: nothing is."""
    if plan.chosen is None:
        return None
    layout = plan.chosen.layout
    machines = Machines.of(layout, device)
    devices = machines.count * machines.devices
    if devices == layout.devices:
        return None
    return (
        f"deployed on {plural(machines.count, 'machine')} of {machines.devices}: {plural(devices, 'device')}, "
        f"${devices * plan.price_per_hour:.2f} per hour, {devices - layout.devices} of them without a worker"
    )


def helm_values(plan: Plan, hardware: Hardware, source: str) -> str:
    """YAML. `source`: the checkpoint that the cluster serves. Raises InputError when the plan found nothing."""
    if plan.chosen is None:
        raise InputError("--values: nothing meets the objectives, so there is nothing to deploy", field="--values")
    layout = plan.chosen.layout
    device = hardware.device
    is_gpu = device.name != "cpu"
    router = router_spec(layout)
    cluster: dict[str, Any] = {
        "name": "planned",
        "models": [
            {
                "source": source,
                "prefill": {"workers": layout.prefill_workers, "tp": layout.prefill_tp},
                "decode": {"workers": layout.decode_workers, "tp": layout.decode_tp},
                "engine": {
                    "device": "cuda" if is_gpu else "cpu",
                    "dtype": "bfloat16" if is_gpu else "float32",
                    **_quantised(hardware),
                    "block_tokens": ENGINE_BLOCK_TOKENS,
                    "kv_memory_bytes": int(hardware.kv_rank_bytes(*layout.widths)),
                    "max_running_requests": plan.goal.max_running_requests,
                    "max_step_tokens": layout.step_tokens,
                },
            }
        ],
        "router": {
            "max_prefill_tokens_in_flight": router.max_prefill_tokens_in_flight,
            "max_queued_requests": router.max_queued_requests,
        },
    }
    values = {"cluster": cluster, **_models(source, hardware), **_pods(layout, device)}
    return "".join(f"# {line}\n" for line in _head(plan, hardware, source)) + yaml.safe_dump(values, sort_keys=False)


def _quantised(hardware: Hardware) -> dict[str, str]:
    """Where the plan counts with one byte for each element."""
    if hardware.model.shape.weight_bytes > 1:
        return {}
    return {"weights": hardware.device.eight_bit_weights, "kv_dtype": "fp8"}


def _stored_bytes(hardware: Hardware) -> float:
    """Of the checkpoint: what is served in less is made of two bytes for each parameter."""
    return hardware.model.resident_params * max(2.0, hardware.model.shape.weight_bytes)


def _head(plan: Plan, hardware: Hardware, source: str) -> Iterator[str]:
    """What was planned, what that makes on whole machines, and what has to be there before it is installed."""
    assert plan.chosen is not None
    layout, device = plan.chosen.layout, hardware.device
    costs = "" if plan.costs is None else f", ${plan.costs.per_hour:.2f} per hour"
    yield f"Planned by `tandem plan` for {plan.model} on {layout.devices} x {plan.device}{costs}:"
    yield f"{layout}; {plan.chosen.joint:.1%} of the simulated requests met their objectives."
    if (more := describe_machines(plan, device)) is not None:
        yield f"It is {more}."
    if Machines.of(layout, device).count > 1:
        yield f"Wants a Secret: kubectl create secret generic {REDIS_SECRET} --from-literal=password=..."
    if source.startswith("/"):
        yield f"Wants a volume with {source}: --set models.existingClaim=CLAIM (or models.hostPath)"
    elif source != DEMO_MODEL:
        yield f"Wants a Secret: kubectl create secret generic {HUB_SECRET} --from-literal=token=..."
        yield "(for a model that is not gated, leave models.hubTokenSecret out)."
        yield f"Each pod pulls {_stored_bytes(hardware) / 1e9:.0f} GB into a volume of its own;"
        yield "--set models.existingClaim=CLAIM (ReadWriteMany) keeps them."


def _models(source: str, hardware: Hardware) -> dict[str, Any]:
    """Where weights from a hub find room, and the token that brings gated ones."""
    if source.startswith("/") or source == DEMO_MODEL:
        return {}
    gib = math.ceil(_stored_bytes(hardware) * HUB_MARGIN / GIB)
    return {"models": {"emptyDirSize": f"{gib + 1}Gi", "hubTokenSecret": {"name": HUB_SECRET}}}


def _pods(layout: ClusterLayout, device: DeviceSpec) -> dict[str, Any]:
    """A pod for each machine, as large as the workers in it need it."""
    machines = Machines.of(layout, device)
    ranks = machines.devices
    node: dict[str, Any] = {"replicas": machines.count - 1}
    values: dict[str, Any] = {"node": node}
    if device.name == "cpu":
        cores, memory_gib = ranks, math.ceil(ranks * (device.memory_bytes / GIB + CPU_RANK_GIB))
    else:
        values["image"] = {"repository": GPU_IMAGE}
        values["startupSeconds"] = GPU_START_S
        node["gpus"] = ranks
        cores, memory_gib = ranks * GPU_CORES, ranks * GPU_HOST_GIB
    amount = {"memory": f"{memory_gib}Gi"}
    node["resources"] = {"requests": {"cpu": str(cores), **amount}, "limits": amount}
    if machines.count > 1:  # only the head pod reaches an embedded Redis
        values["redis"] = {"mode": "valkey", "valkey": {"auth": {"existingSecret": REDIS_SECRET}}}
    return values
