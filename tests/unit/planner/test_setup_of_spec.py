"""The simulator's setup of a spec whose roles have engines of their own."""

from __future__ import annotations

from typing import Any

import pytest

from planner.devices import DeviceSpec, find_device
from planner.hardware import Hardware, setup_of_spec, spec_notes
from planner.models import ElementSizes, find_model
from planner.simulator.setup import Setup
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.scheduler.batching import BatchRule

GPU = {"device": "cuda", "dtype": "bfloat16"}


def setup(
    element_bytes: float = 2.0, name: str = "llama-3-8b", device: str | DeviceSpec = "h100", **model: Any
) -> Setup:
    spec = ClusterSpec.model_validate({"models": [model], "control": {"backend": "subprocess"}})
    device = find_device(device) if isinstance(device, str) else device
    hardware = Hardware(find_model(name, ElementSizes(element_bytes, element_bytes, device.element_bytes)), device)
    return setup_of_spec(spec, hardware, mean_prompt_tokens=1000.0, trace_block=None)


def test_each_pool_has_the_limits_of_its_own_engine() -> None:
    found = setup(
        engine={"max_step_tokens": 1024, "kv_blocks": 100, "longest_step_s": 0.05},
        prefill={"engine": {"max_step_tokens": 8192, "kv_blocks": 50, "max_model_tokens": 4096}},
        decode={"engine": {"max_running_requests": 256}},
    )
    assert found.prefill is not None
    assert (found.prefill.max_step_tokens, found.decode.max_step_tokens) == (8192, 1024)
    assert found.decode.longest_step_s == 0.05
    assert (found.prefill.max_running_requests, found.decode.max_running_requests) == (64, 256)
    assert (found.prefill.kv_tokens, found.decode.kv_tokens) == (800, 1600)
    assert found.max_model_tokens == 4096
    assert setup().max_model_tokens == 131_072
    assert not found.can_change_roles
    assert setup().can_change_roles


def test_a_pool_has_the_memory_of_its_own_engine() -> None:
    found = setup(engine={"kv_memory_bytes": 1 << 30}, prefill={"tp": 2, "engine": {"kv_memory_bytes": 2 << 30}})
    assert found.prefill is not None
    assert found.decode.kv_tokens == (1 << 30) // 131_072
    assert found.prefill.kv_tokens == 4 * found.decode.kv_tokens, "twice as much in each of two ranks"


def test_a_cpu_has_the_pool_that_its_engine_takes() -> None:
    """Not all memory that is left, as a GPU."""
    token_bytes = 2 * 30 * 3 * 64 * 4
    demo: dict[str, Any] = {"element_bytes": 4.0, "name": "smollm2-135m", "device": "cpu"}
    assert setup(**demo).decode.kv_tokens == (512 << 20) // token_bytes
    assert setup(**demo, engine={"kv_memory_bytes": 1 << 30}).decode.kv_tokens == (1 << 30) // token_bytes
    assert setup(**demo, engine={"kv_blocks": 100}).decode.kv_tokens == 1600
    assert setup().decode.kv_tokens == int((72e9 - find_model("llama-3-8b").resident_bytes) / 131_072)


def test_the_formats_of_the_spec_hold() -> None:
    wide, narrow = setup(), setup(engine=GPU | {"weights": "fp8", "kv_dtype": "fp8"})
    assert narrow.decode.kv_tokens == pytest.approx((72 - 9.08) / (72 - 16.06) * 2 * wide.decode.kv_tokens, rel=0.01)
    assert narrow.kv_token_bytes == wide.kv_token_bytes / 2


def test_the_dtype_of_the_spec_holds() -> None:
    """Also the default, float32, if the spec names the device."""
    half, single = setup(engine=GPU), setup(engine={"device": "cuda"})
    assert half.kv_token_bytes == setup().kv_token_bytes
    assert single.kv_token_bytes == 2 * half.kv_token_bytes
    assert single.decode.kv_tokens == pytest.approx((72 - 32.12) / (72 - 16.06) / 2 * half.decode.kv_tokens, rel=0.01)
    assert single.decode.cost.decode_step_s(1, 1) > 1.5 * half.decode.cost.decode_step_s(1, 1)
    assert setup(engine={"dtype": "float32"}).kv_token_bytes == single.kv_token_bytes


def test_what_the_spec_leaves_open_or_has_of_its_own_is_noted() -> None:
    def notes(**engine: str) -> list[str]:
        spec = ClusterSpec.model_validate({"models": [{"engine": engine}], "control": {"backend": "subprocess"}})
        return spec_notes(spec, Hardware(find_model("llama-3-8b"), find_device("h100")))

    assert notes(**GPU) == []
    assert notes() == ["engine.device is cpu, its default; set it to cuda to deploy what is simulated here"]
    (said,) = notes(device="cuda")
    assert said.startswith("engine.dtype is float32: elements of 4 bytes, where the file of h100 has 2")


@pytest.mark.parametrize(("device", "named"), [("cpu", "cuda"), ("h100", "cpu")])
def test_a_device_of_the_other_kind_is_refused(device: str, named: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--device: expected one of kind {named}, because engine.device.*got {device}"
    ):
        setup(device=device, name="smollm2-135m", engine={"device": named})


def test_a_pool_batches_as_its_engine() -> None:
    assert setup().decode.batches is None
    engine = {"batching": "dynamic", "batching_window_s": 0.5, "max_running_requests": 9}
    assert setup(engine=engine, prefill={"workers": 0}).decode.batches == BatchRule(9, 0.5, from_first=True)


def test_a_rank_has_its_share_of_a_device() -> None:
    whole = setup(engine=GPU).decode
    half = setup(engine=GPU | {"device_share": 0.5}).decode
    # Both hold the weights of 16 GB; 72 and 36 GB are for them and for KV.
    assert half.kv_tokens / whole.kv_tokens == pytest.approx((36 - 16.06) / (72 - 16.06), rel=0.01)
    device = find_device("h100")
    layers_s = 32 * device.layer_overhead_s  # which no share makes longer
    for rows, fast, slow in (
        (1, whole.cost.prefill_s(2048, 0), half.cost.prefill_s(2048, 0)),
        (8, whole.cost.decode_step_s(8, 8192), half.cost.decode_step_s(8, 8192)),
    ):
        overhead_s = layers_s + rows * device.row_overhead_s
        assert slow - overhead_s == pytest.approx(2 * (fast - overhead_s))
    assert half.cost.transfer_s(1 << 30) == whole.cost.transfer_s(1 << 30)


def test_weights_that_do_not_fit_into_a_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-8b needs more than 2\.2 x 0\.1 of h100"):
        setup(engine=GPU | {"device_share": 0.1})


@pytest.mark.parametrize(
    ("prefill", "decode", "share", "devices"),
    [
        ((1, 1), (1, 1), 1.0, 2),
        ((1, 1), (1, 1), 0.5, 1),
        ((3, 1), (2, 1), 0.45, 3),  # two ranks to a device
        ((1, 1), (1, 1), 0.6, 2),
        ((5, 1), (5, 1), 0.1, 1),
        ((1, 1), (1, 4), 0.25, 4),  # the ranks of a worker are on different devices
    ],
)
def test_as_many_devices_as_hold_the_shares(
    prefill: tuple[int, int], decode: tuple[int, int], share: float, devices: int
) -> None:
    pools = [{"workers": workers, "tp": tp} for workers, tp in (prefill, decode)]
    large = find_device("h100").model_copy(update={"memory_bytes": 1e12})
    engine = GPU | {"device_share": share}
    assert setup(device=large, prefill=pools[0], decode=pools[1], engine=engine).devices == devices


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
