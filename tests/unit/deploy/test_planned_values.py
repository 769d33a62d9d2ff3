"""What `tandem plan --values` writes is rendered by the real helm as it is, with the volume and nothing else given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.halving import Effort
from planner.search.layout import Layout
from planner.search.plan import Goal, Means, Plan, make_plan
from planner.search.values import checked_source, helm_values
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from tandem.errors import InputError


def planned(layout: Layout, model: str, device: str) -> tuple[Plan, Hardware]:
    """A plan that came to `layout`."""
    hardware = Hardware(find_model(model), find_device(device))
    traffic = synthetic_trace(60, Gamma(0.1), LengthSpec(50, 0.1, 100), LengthSpec(5, 0.1, 10), seed=1)
    goal = Goal(Slo(ttft_s=100.0), max_devices=max(hardware.widths()[0], 1), step_tokens=(2048,))
    plan = make_plan(traffic, hardware, goal, Means(effort=Effort(requests=50, per_price=1, finalists=1)))
    assert plan.chosen is not None
    return replace(plan, chosen=replace(plan.chosen, job=replace(plan.chosen.job, layout=layout))), hardware


@pytest.mark.parametrize(
    ("layout", "model", "device", "source", "pods"),
    [
        (Layout(2, 4, 1, 4, 2048), "llama-3-70b", "h100", "/models/llama-3-70b", 2),
        (Layout(1, 1, 2, 1, 2048), "llama-3-8b", "h100", "meta-llama/Meta-Llama-3-8B-Instruct", 1),
        (Layout(0, 1, 1, 1, 2048), "smollm2-135m", "cpu", "smollm2-135m", 1),
    ],
)
def test_planned_values_render_as_they_are(
    layout: Layout, model: str, device: str, source: str, pods: int, render: Callable[..., Any], tmp_path: Path
) -> None:
    plan, hardware = planned(layout, model, device)
    path = tmp_path / "plan.yaml"
    path.write_text(helm_values(plan, hardware, checked_source(source, model)))
    manifests = render("-f", str(path), "--set", "models.existingClaim=weights")
    cluster = manifests["RayCluster", "test-tandem"]["spec"]
    assert 1 + sum(group["replicas"] for group in cluster.get("workerGroupSpecs", ())) == pods
    pod = cluster["headGroupSpec"]["template"]["spec"]
    containers = [container["name"] for container in pod.get("initContainers", ())]
    assert any(name.startswith("pull-model") for name in containers) == (not source.startswith("/"))
    main = pod["containers"][0]
    assert main["image"].split(":")[0].endswith("tandem" if device == "cpu" else "tandem-cuda")
    assert main["resources"]["limits"].get("nvidia.com/gpu", 0) == (0 if device == "cpu" else min(8, layout.devices))
    assert (("Deployment", "test-tandem-valkey") in manifests) == (pods > 1)


def test_the_name_of_a_shape_is_no_checkpoint() -> None:
    with pytest.raises(InputError, match=r"--source: expected with --values the checkpoint .* 'llama-3-70b' is only"):
        checked_source(None, "llama-3-70b")
    assert checked_source(None, "smollm2-135m") == "smollm2-135m"
    assert checked_source(None, "meta-llama/Llama-3-70B") == "meta-llama/Llama-3-70B"
