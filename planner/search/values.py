"""A plan as values of the Helm chart: `cluster` is the very schema of `tandem up --config`."""

from __future__ import annotations

from typing import Any

import yaml

from planner.hardware import Hardware
from planner.search.evaluate import ENGINE_BLOCK_TOKENS, router_spec
from planner.search.plan import Plan
from tandem.errors import InputError


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
    values: dict[str, Any] = {"cluster": cluster}
    if is_gpu:
        nodes = -(-layout.devices // device.devices_per_node)
        values["node"] = {"gpus": min(layout.devices, device.devices_per_node), "replicas": nodes - 1}
    costs = "" if plan.costs is None else f", ${plan.costs.per_hour:.2f} per hour"
    head = (
        f"# Planned by `tandem plan` for {plan.model} on {layout.devices} x {plan.device}{costs}:\n"
        f"# {layout}; {plan.chosen.joint:.1%} of the simulated requests met their objectives.\n"
    )
    return head + yaml.safe_dump(values, sort_keys=False)
