"""Cost models from measurements: what is fitted gives the measurements back, and says how well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cost import ConstrainedCostModel, CostModel, PrefillWork, RooflineCostModel
from planner.devices import find_device, shipped_devices
from planner.fitted import (
    DecodePoint,
    Measurements,
    MixedPoint,
    PrefillPoint,
    Reach,
    fit,
    read_measured,
    write_measured,
)
from planner.hardware import Hardware
from planner.models import KNOWN, find_model
from planner.published import read_distserve, read_splitwise
from planner.shapes import LinkShape
from tandem.errors import ConfigError

LINK = LinkShape(1e9)
GRID = [16, 64, 256, 1024]


def prefill_s(tokens: int, context: int) -> float:
    return 0.01 + 1e-4 * tokens + 2e-8 * (tokens * tokens + 2 * tokens * context)


def decode_s(batch: int, context: int) -> float:
    return 0.004 + 5e-7 * context + 1e-4 * batch


def measured() -> tuple[list[PrefillPoint], list[DecodePoint]]:
    prefills = [PrefillPoint(n, c, prefill_s(n, c)) for n in GRID for c in (0, 512)]
    decodes = [DecodePoint(b, b * c, decode_s(b, b * c)) for b in (1, 4, 16) for c in GRID]
    return prefills, decodes


def test_a_fit_gives_back_what_it_was_made_of_and_states_its_error() -> None:
    model: CostModel = fit(*measured(), LINK, "test")
    assert model.prefill_s(300, 100) == pytest.approx(prefill_s(300, 100))
    assert model.decode_step_s(8, 4000) == pytest.approx(decode_s(8, 4000))
    assert model.fit_error == pytest.approx(0.0, abs=1e-9)


def test_decoding_beside_prompts_adds_what_was_measured_and_no_step_is_shorter_than_its_parts() -> None:
    def beside(factor: float) -> list[MixedPoint]:
        adds_s = factor * (decode_s(8, 800) - 0.004)
        return [MixedPoint(tokens, 8, 800, prefill_s(tokens, 0) + adds_s) for tokens in (16, 64, 256)]

    summed = fit(*measured(), LINK, "test").step_s([PrefillWork(64, 0)], 8, 800)
    assert summed == pytest.approx(prefill_s(64, 0) + decode_s(8, 800) - 0.004)
    model = fit(*measured(), LINK, "test", mixed=beside(0.5))
    assert model.beside == pytest.approx(0.5)
    assert model.step_s([PrefillWork(64, 0)], 8, 800) == pytest.approx(
        prefill_s(64, 0) + 0.5 * (decode_s(8, 800) - 0.004)
    )
    free = fit(*measured(), LINK, "test", mixed=beside(-1.0))
    assert free.step_s([PrefillWork(16, 0)], 8, 800) == pytest.approx(prefill_s(16, 0))
    assert free.step_s([PrefillWork(16, 0)], 512, 1 << 20) == free.decode_step_s(512, 1 << 20)


def test_times_that_nothing_takes_are_refused() -> None:
    prefills, decodes = measured()
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="test: mixed: expected seconds above 0"):
            fit(prefills, decodes, LINK, "test", mixed=[MixedPoint(16, 2, 128, wrong)])
        with pytest.raises(ConfigError, match="test: prefill: expected seconds above 0"):
            fit([prefills[0]._replace(seconds=wrong), *prefills], decodes, LINK, "test")


def test_noise_shows_in_the_error() -> None:
    prefills, decodes = measured()
    noisy = [each._replace(seconds=each.seconds * (1.2 if at % 2 else 0.8)) for at, each in enumerate(prefills)]
    error = fit(noisy, decodes, LINK, "test").fit_error
    assert error is not None
    assert 0.1 < error < 0.25


def test_more_work_never_costs_less_even_where_the_measurements_say_so() -> None:
    odd = [PrefillPoint(n, 0, 0.1 - 1e-5 * n) for n in GRID]
    model = fit(odd, measured()[1], LINK, "test")
    assert model.prefill_s(1024, 0) >= model.prefill_s(16, 0) > 0


def test_each_constrained_row_that_is_sampled_adds_its_mask() -> None:
    free = fit(*measured(), LINK, "test")
    masked = ConstrainedCostModel(free, share=0.25, mask_s_per_row=0.001)
    assert masked.decode_step_s(8, 800) == pytest.approx(free.decode_step_s(8, 800) + 0.002)
    assert masked.prefill_s(100, 0) == pytest.approx(free.prefill_s(100, 0) + 0.00025)
    assert masked.step_s([PrefillWork(9, 0)], 3, 30) == pytest.approx(free.step_s([PrefillWork(9, 0)], 3, 30) + 0.001)
    assert (masked.decode_step_s(0, 0), masked.transfer_s(1 << 20)) == (0.0, free.transfer_s(1 << 20))
    with pytest.raises(ConfigError, match="share"):
        ConstrainedCostModel(free, share=1.5, mask_s_per_row=0.0)


def test_a_step_of_both_kinds_pays_its_overhead_once() -> None:
    model = fit(*measured(), LINK, "test")
    both = model.step_s([PrefillWork(100, 0)], 4, 400)
    assert both == pytest.approx(prefill_s(100, 0) + decode_s(4, 400) - 0.004)


def test_measurements_come_back_from_their_file(tmp_path: Path) -> None:
    prefills, decodes = measured()
    write_measured(tmp_path / "cost.json", {2: Measurements(prefills, decodes, LINK)}, {"device": "test"})
    (model,) = read_measured(tmp_path / "cost.json").values()
    assert model.prefill_s(300, 100) == pytest.approx(prefill_s(300, 100))


def test_steps_beyond_what_was_measured_are_noted() -> None:
    model = fit(*measured(), LINK, "test")
    assert model.reach == Reach(1024, 16, 1536)
    assert model.beyond(Reach(1024, 16, 1536)) is None
    assert model.beyond(Reach(8192, 256, 1536)) == (
        "the last slope continues beyond what was measured, up to 8,192 prompt tokens in a step (measured: 1,024), 256 "
        "requests at a time (measured: 16)"
    )
    assert "2,000 tokens of a context (measured: 1,536)" in (model.beyond(Reach(1, 1, 2000)) or "")
    assert repr(model) == repr(replace(model, reach=None)), "or calibrations of it would be refused"


def bent_s(batch: int, context: int) -> float:
    """As a CPU has it: the first rows of a step cost most."""
    return 0.04 + 7e-6 * context + 0.008 * min(batch, 8) + 0.004 * max(0, batch - 8)


def test_a_measured_profile_is_followed_where_batches_bend_it(tmp_path: Path) -> None:
    decodes = [DecodePoint(b, b * c, bent_s(b, b * c)) for b in (1, 2, 8, 32, 64) for c in (32, 128)]
    write_measured(tmp_path / "cost.json", {1: Measurements(measured()[0], decodes, LINK)}, {})
    (model,) = read_measured(tmp_path / "cost.json").values()
    for batch in (1, 4, 8, 20, 48, 100):
        assert model.decode_step_s(batch, 60 * batch) == pytest.approx(bent_s(batch, 60 * batch))
    straight = fit(measured()[0], decodes, LINK, "test")
    assert straight.fit_error is not None
    assert model.fit_error is not None
    assert model.fit_error < 1e-6 < 0.03 < straight.fit_error
    assert model.step_s([PrefillWork(100, 0)], 32, 0) == pytest.approx(prefill_s(100, 0) + bent_s(32, 0) - 0.01)


def test_a_bent_fit_too_never_says_that_more_work_costs_less(tmp_path: Path) -> None:
    took = {1: 0.302, 4: 0.2, 16: 0.195, 64: 0.6}  # measured beside other work
    decodes = [DecodePoint(batch, 64 * batch, seconds) for batch, seconds in took.items()]
    model = fit(measured()[0], decodes, LINK, "test", piecewise=True)
    steps = [model.decode_step_s(batch, 64 * batch) for batch in range(1, 100)]
    assert steps == sorted(steps)


def test_a_published_table_of_milliseconds_is_read_by_width(tmp_path: Path) -> None:
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
    rows = [
        f"m,h,{n},{b},128,{1000 * prefill_s(n * b, 0)},{1000 * decode_s(b, b * (n + 64))},{tp}\n"
        for tp in (2, 4) for n in GRID for b in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "table.csv"
    path.write_text(head + "".join(rows))
    models = read_splitwise(path, "m", "h", LINK)
    assert sorted(models) == [2, 4]
    assert models[2].decode_step_s(2, 600) == pytest.approx(decode_s(2, 600), rel=0.05)
    with pytest.raises(ConfigError, match="m/h"):
        read_splitwise(path, "m", "other", LINK)


HEAD = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"--cost: .*table\.csv: No such file or directory"),
        (HEAD.replace(",tensor_parallel", ""), r"table\.csv, line 1: expected a column tensor_parallel"),
        (HEAD + "m,h,64\n", r"table\.csv, line 2, tensor_parallel: expected a number above 0, got nothing"),
        (HEAD + "m,h,64,1,128,9,9,2\nm,h,64,one,128,9,9,2\n", r"line 3, batch_size: expected a number.*got 'one'"),
        (HEAD + "m,h,64,1,128,9,-1,2\n", r"line 2, token_time: expected a number above 0, got '-1'"),
        (HEAD + "m,h,64,1,128,9,9,2\n", r"expected at least 3 prefill and 3 decode measurements, got 1 and 1"),
        ("\0", r"expected a column model|expected a CSV table"),
        (b"\xff\xfe", r"--cost: .*table\.csv: expected a CSV table"),
    ],
)
def test_a_table_that_is_none_is_refused_by_line_and_column(
    tmp_path: Path, text: str | bytes | None, said: str
) -> None:
    path = tmp_path / "table.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        read_splitwise(path, "m", "h", LINK)


@pytest.mark.parametrize("content", [5, None, [], {"opt": 5}, {"opt": [1]}, {"opt": {"one": {}}}, {"opt": {"1": 5}}])
def test_published_coefficients_of_another_form_are_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / "fit.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        read_distserve(tmp_path / "fit.json", "opt", LINK)


def test_published_coefficients_change_their_line_with_the_batch(tmp_path: Path) -> None:
    entry = {
        "decoding_large_small_bs_threshold": 10,
        "prefill": [10, 0.1, 2e-5],
        "decoding_smallbs": [5, 0.001, 0.1],
        "decoding_largebs": [7, 0.001, 0.2],
    }
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"opt": {"1": entry}}))
    (model,) = read_distserve(path, "opt", LINK).values()
    assert model.prefill_s(100, 0) == pytest.approx(0.01 + 0.01 + 2e-5 * 100**2 / 1000)
    assert model.decode_step_s(9, 0) == pytest.approx(0.0059)
    assert model.decode_step_s(10, 0) == pytest.approx(0.009)
    assert model.fit_error is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"widths": [{"tp": 1}]}', '{"widths": 3}'])
def test_what_is_no_cost_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError):
        read_measured(tmp_path / "bad.json")


class TestDevicesAndModels:
    @pytest.mark.parametrize("name", shipped_devices())
    def test_every_shipped_device_serves_the_demo_model(self, name: str) -> None:
        hardware = Hardware(find_model("smollm2-135m"), find_device(name))
        assert 1 in hardware.widths()
        assert hardware.cost(1).prefill_s(512, 0) > 0

    def test_parameters_are_those_of_the_checkpoints(self) -> None:
        billions = {name: find_model(name).resident_params / 1e9 for name in KNOWN}
        assert billions["llama-3-8b"] == pytest.approx(8.03, rel=0.001)
        assert billions["llama-3-70b"] == pytest.approx(70.55, rel=0.001)
        assert billions["llama-3-405b"] == pytest.approx(405.8, rel=0.002)
        assert billions["smollm2-135m"] == pytest.approx(0.1345, rel=0.002)

    def test_70b_does_not_fit_one_h100_and_says_so(self) -> None:
        hardware = Hardware(find_model("llama-3-70b"), find_device("h100"))
        assert hardware.widths() == [2, 4, 8]
        with pytest.raises(ConfigError, match=r"more than 2\.0 x h100"):
            hardware.pool(1, 1)

    def test_wider_workers_are_faster_but_not_by_their_width(self) -> None:
        hardware = Hardware(find_model("llama-3-70b"), find_device("h100"))
        narrow, wide = hardware.cost(4), hardware.cost(8)
        assert isinstance(narrow, RooflineCostModel)
        assert 1.3 < narrow.prefill_s(4096, 0) / wide.prefill_s(4096, 0) < 2.0

    def test_a_device_file_of_ones_own_names_the_field_that_is_wrong(self, tmp_path: Path) -> None:
        path = tmp_path / "own.yaml"
        path.write_text("name: own\nflops_per_s: -1\n")
        with pytest.raises(ConfigError, match="flops_per_s"):
            find_device(str(path))
        with pytest.raises(ConfigError, match="a100"):
            find_device("h900")
