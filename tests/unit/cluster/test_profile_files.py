"""A file of `tandem profile` is of one model and one engine: what contradicts it is refused, and values deploy it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli.commands.planning.inputs import HardwareFlags, describe_costs, load_hardware
from cluster.cli.main import app
from planner.acceptance import Acceptance
from planner.fitted import DecodePoint, Measurements, PrefillPoint, write_measured
from planner.hardware import Hardware, setup_of_spec, spec_notes
from planner.search.values import check_values, speculation
from planner.shapes import LinkShape
from tandem.config.engine import EngineSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError

SIZES = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3}
INT8 = EngineSpec(weights="int8", threads_per_rank=4)
TRAFFIC = ["synthetic", "--arrivals", "poisson:4", "--lengths", "600:30", "--requests", "60"]
PLAN = ["--ttft", "2", "--devices", "2", "--simulated", "50", "--step-tokens", "512", "--jobs", "1"]


def profile(folder: Path, engine: EngineSpec = INT8, acceptance: Acceptance | None = None, **about: Any) -> Path:
    prefills = [PrefillPoint(tokens, 0, 0.004 + 1e-5 * tokens) for tokens in (16, 64, 256, 1024)]
    decodes = [DecodePoint(batch, 256 * batch, 0.004 + 1e-4 * batch) for batch in (1, 4, 16)]
    found = {"model": "smollm2-135m", "sizes": SIZES, "engine": engine.model_dump_json(exclude_none=True)} | about
    write_measured(
        folder / "cost.json", {1: Measurements(prefills, decodes, LinkShape(1e9))}, found, acceptance=acceptance
    )
    return folder / "cost.json"


def loaded(cost: Path, model: str = "smollm2-135m", device: str = "cpu", **flags: Any) -> Hardware:
    return load_hardware(HardwareFlags(model, device, str(cost), **flags))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_step_times_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--cost: expected step times of llama-3-8b \(layers 32, .*cost\.json, .*smollm2-135m \(layers 30",
    ):
        loaded(profile(tmp_path), model="llama-3-8b")
    with pytest.raises(ConfigError, match="expected step times of llama-3-8b"):
        load_hardware(HardwareFlags("llama-3-8b", "cpu", f"{profile(tmp_path)}:x"))


def test_memory_is_that_of_the_formats_that_were_measured(tmp_path: Path) -> None:
    shape = loaded(profile(tmp_path)).model.shape
    assert (shape.weight_bytes, shape.kv_bytes, shape.activation_bytes) == (1.0, 4.0, 4.0)
    shape = loaded(profile(tmp_path, EngineSpec(kv_dtype="int8"))).model.shape
    assert (shape.weight_bytes, shape.kv_bytes, shape.activation_bytes) == (4.0, 1.0, 4.0)
    assert loaded(profile(tmp_path, EngineSpec()), element_bytes=4.0).model.shape.weight_bytes == 4.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"element_bytes": 4.0},
            "--element-bytes: expected 1 or none, because cost.json was measured with weights int8",
        ),
        ({"kv_bytes": 1.0}, "--kv-bytes: expected 4 or none"),
        (
            {"device": "h100"},
            "--device: expected one of kind cpu, because cost.json was measured with engine.device cpu",
        ),
    ],
)
def test_options_that_contradict_what_was_measured_are_refused(tmp_path: Path, flags: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(profile(tmp_path), **flags)
    assert said in refused.value.message


def test_a_file_of_an_earlier_version_is_read_with_a_note(tmp_path: Path) -> None:
    cost = profile(tmp_path)
    content = json.loads(cost.read_text())
    cost.write_text(json.dumps(content | {"about": {"model": "demo"}}))
    said = describe_costs(loaded(cost), 1)
    assert "cost.json does not say the sizes of its model (demo) and is taken for smollm2-135m" in said
    assert "cost.json does not say its engine settings" in said
    cost.write_text(json.dumps({"widths": content["widths"]}))
    assert "its model (unknown)" in describe_costs(loaded(cost), 1)
    assert "does not say" not in describe_costs(loaded(profile(tmp_path)), 1)


def test_a_spec_with_other_settings_is_refused_by_its_field(tmp_path: Path) -> None:
    hardware = loaded(profile(tmp_path))

    def simulated(**engine: Any) -> None:
        spec = ClusterSpec.model_validate({"models": [{"engine": engine}], "control": {"backend": "subprocess"}})
        setup_of_spec(spec, hardware, mean_prompt_tokens=100.0, trace_block=None)

    simulated(weights="int8", threads_per_rank=4)
    with pytest.raises(
        ConfigError, match=r"engine\.weights: expected int8, with which cost\.json was measured, got dense"
    ):
        simulated(threads_per_rank=4)
    with pytest.raises(ConfigError, match=r"engine\.threads_per_rank: expected 4.*got 1"):
        simulated(weights="int8")


def test_without_a_spec_a_simulation_has_the_settings_that_were_measured(tmp_path: Path) -> None:
    result = run("simulate", *TRAFFIC, "--model", "smollm2-135m", "--cost", str(profile(tmp_path)))
    assert result.exit_code == 0, result.output
    assert "a device is a rank of 4 threads" in result.stdout.replace("\n", " ")


def test_values_deploy_what_was_measured(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    cost = profile(tmp_path, INT8.model_copy(update={"kv_dtype": "int8"}))
    model = ["--model", "smollm2-135m", "--device", "cpu", "--cost", str(cost)]
    result = run("plan", *TRAFFIC, *model, *PLAN, "--values", str(values))
    assert result.exit_code == 0, result.output
    found = yaml.safe_load(values.read_text())
    engine = ClusterSpec.model_validate(found["cluster"]).models[0].engine
    assert (engine.dtype, engine.weights, engine.kv_dtype, engine.threads_per_rank) == ("float32", "int8", "int8", 4)
    ranks = json.loads(run("plan", *TRAFFIC, *model, *PLAN, "--json").stdout)["chosen"]["deployed"]["devices"]
    assert found["node"]["resources"]["requests"]["cpu"] == str(4 * ranks)


LOOKUP = EngineSpec(speculation="lookup", speculation_tokens=4)


def test_a_profile_that_turns_speculation_on_says_so_and_values_have_it(tmp_path: Path) -> None:
    values, cost = tmp_path / "values.yaml", profile(tmp_path, LOOKUP, Acceptance(0.7, 3))
    model = ["--model", "smollm2-135m", "--device", "cpu", "--cost", str(cost)]
    result = run("plan", *TRAFFIC, *model, *PLAN, "--values", str(values))
    assert result.exit_code == 0, result.output
    assert "speculation is on, because cost.json was measured with it" in result.stdout.replace("\n", " ")
    engine = ClusterSpec.model_validate(yaml.safe_load(values.read_text())["cluster"]).models[0].engine
    assert (engine.speculation, engine.speculation_tokens) == ("lookup", 3)
    assert "is on, because" not in describe_costs(loaded(cost, acceptance="0.5:4"), 1)
    assert speculation(loaded(cost, acceptance="0.5:4")) == {"speculation": "lookup", "speculation_tokens": 4}


def test_speculation_that_no_setting_is_known_for_has_no_values(tmp_path: Path) -> None:
    for hardware in (
        load_hardware(HardwareFlags("smollm2-135m", "cpu", acceptance="0.7:4")),
        loaded(profile(tmp_path), acceptance="0.7"),
    ):
        with pytest.raises(InputError, match="--values: expected to know how the tokens are proposed"):
            check_values(hardware)
    draft = EngineSpec(speculation="draft", speculation_model="/home/me/small")
    with pytest.raises(InputError, match=r"engine\.speculation_model: expected a folder below /models.*got /home/me"):
        check_values(loaded(profile(tmp_path, draft, Acceptance(0.7))))


def test_a_spec_without_the_speculation_that_is_simulated_is_noted(tmp_path: Path) -> None:
    hardware = loaded(profile(tmp_path, LOOKUP, Acceptance(0.7)))
    spec = ClusterSpec.model_validate({"models": [{}], "control": {"backend": "subprocess"}})
    assert spec_notes(spec, hardware) == [
        "engine.speculation is none, and speculation is simulated: set it to deploy what is simulated here"
    ]


def test_step_times_beyond_the_measured_ones_are_noted(tmp_path: Path) -> None:
    model = ["--model", "smollm2-135m", "--device", "cpu", "--cost", str(profile(tmp_path))]
    beyond = "the last slope continues beyond what was measured, up to "
    planned = run("plan", *TRAFFIC, *model, *PLAN, "--running", "256", "--json").stdout
    assert json.loads(planned)["cost_model"].endswith(f"{beyond}60 requests at a time (measured: 16)")
    simulated = json.loads(run("simulate", *TRAFFIC, *model, "--json").stdout)["cost_model"]
    assert simulated.endswith(f"{beyond}60 requests at a time (measured: 16)")
    few = json.loads(run("plan", *TRAFFIC, *model, *PLAN, "--running", "16", "--json").stdout)["cost_model"]
    assert "last slope" not in few


def test_values_of_another_engine_are_refused_before_the_search(tmp_path: Path) -> None:
    cost = profile(tmp_path, EngineSpec(kind="vllm", block_tokens=32))
    model = ["--model", "smollm2-135m", "--device", "cpu", "--cost", str(cost)]
    result = run("plan", *TRAFFIC, *model, *PLAN, "--values", str(tmp_path / "values.yaml"))
    assert isinstance(result.exception, InputError)
    assert "cost.json of engine.kind vllm" in result.exception.message
