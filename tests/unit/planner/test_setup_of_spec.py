"""The simulator's setup of a spec whose roles have engines of their own."""

from __future__ import annotations

from typing import Any

import pytest

from planner.devices import find_device
from planner.hardware import Hardware, setup_of_spec
from planner.models import find_model
from planner.simulator.setup import Setup
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError


def setup(**model: Any) -> Setup:
    spec = ClusterSpec.model_validate({"models": [model]})
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    return setup_of_spec(spec, hardware, mean_prompt_tokens=1000.0, trace_block=None)


def test_each_pool_has_the_limits_of_its_own_engine() -> None:
    found = setup(
        engine={"max_step_tokens": 1024, "kv_blocks": 100},
        prefill={"engine": {"max_step_tokens": 8192, "kv_blocks": 50, "max_model_tokens": 4096}},
        decode={"engine": {"max_running_requests": 256}},
    )
    assert found.prefill is not None
    assert (found.prefill.max_step_tokens, found.decode.max_step_tokens) == (8192, 1024)
    assert (found.prefill.max_running_requests, found.decode.max_running_requests) == (64, 256)
    assert (found.prefill.kv_tokens, found.decode.kv_tokens) == (800, 1600)
    assert found.max_model_tokens == 4096
    assert not found.can_change_roles
    assert setup().can_change_roles


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"prefill": {"engine": {"dtype": "bfloat16"}}}, "prefill.engine.dtype"),
        ({"decode": {"engine": {"weights": "int8"}}}, "decode.engine.weights"),
    ],
)
def test_roles_of_different_speed_are_refused(model: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="both roles share one cost model") as refused:
        setup(**model)
    assert refused.value.field == field
