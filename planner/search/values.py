"""A plan as values of the Helm chart: `cluster` is the very schema of `tandem up --config`."""

from __future__ import annotations

import math
from typing import Any

import yaml

from planner.devices import DeviceSpec
from planner.hardware import Hardware
from planner.search.evaluate import ENGINE_BLOCK_TOKENS, router_spec
from planner.search.layout import Layout
from planner.search.plan import Plan
from tandem.config import DEMO_MODEL
from tandem.errors import InputError

REDIS_SECRET = "tandem-valkey"
GPU_IMAGE = "tandem-cuda"
GPU_CORES = 4  # of the host for each device, with routers and transfer agents
GPU_HOST_GIB = 32  # for each device: weights on their way
GPU_START_S = 1800
CPU_RANK_GIB = 2  # of a rank, beside its weights and KV pool
GIB = 1 << 30


def checked_source(source: str | None, model: str) -> str:
    """What the values file serves. Raises InputError when that is only the name of a shape."""
    found = source or model
    if "/" in found or found == DEMO_MODEL:
        return found
    raise InputError(
        f"--source: expected with --values the checkpoint to serve, for {found!r} is only a shape: a hub name "
        "(meta-llama/Meta-Llama-3-70B-Instruct) or a folder in the pods (/models/llama-3-70b)",
        field="--source",
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
    values = {"cluster": cluster, **_pods(layout, device)}
    costs = "" if plan.costs is None else f", ${plan.costs.per_hour:.2f} per hour"
    head = (
        f"# Planned by `tandem plan` for {plan.model} on {layout.devices} x {plan.device}{costs}:\n"
        f"# {layout}; {plan.chosen.joint:.1%} of the simulated requests met their objectives.\n"
    )
    if "redis" in values:
        head += f"# Wants a Secret: kubectl create secret generic {REDIS_SECRET} --from-literal=password=...\n"
    return head + yaml.safe_dump(values, sort_keys=False)


def _pods(layout: Layout, device: DeviceSpec) -> dict[str, Any]:
    """A pod for each machine, as large as the workers in it need it."""
    nodes = -(-layout.devices // device.devices_per_node)
    ranks = min(layout.devices, device.devices_per_node)
    node: dict[str, Any] = {"replicas": nodes - 1}
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
    if nodes > 1:  # only the head pod reaches an embedded Redis
        values["redis"] = {"mode": "valkey", "valkey": {"auth": {"existingSecret": REDIS_SECRET}}}
    return values
