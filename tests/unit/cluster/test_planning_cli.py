"""`tandem simulate` and `tandem plan` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli.commands.planning.inputs import parse_arrivals
from cluster.cli.main import app
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError, TandemError

TRAFFIC = ["synthetic", "--arrivals", "poisson:4", "--lengths", "600:30", "--requests", "60"]
MODEL = ["--model", "llama-3-8b", "--device", "h100"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_simulate_prints_the_whole_report_as_json() -> None:
    result = run("simulate", *TRAFFIC, *MODEL, "--ttft", "1", "--tpot", "0.05", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["finished"] == 60
    assert report["ttft_s"].keys() >= {"p50", "p90", "p95", "p99"}
    assert report["attainment"]["joint"] == 1.0
    assert report["pools"].keys() == {"prefill", "decode"}
    assert "roofline" in report["cost_model"]


def test_simulate_shows_people_the_same() -> None:
    result = run("simulate", *TRAFFIC, *MODEL, "--prefill", "0", "--fault", "redis@1+1", "--load", "2")
    assert result.exit_code == 0, result.output
    assert "1 decode x TP 1" in result.stdout
    assert "load x 2" in result.stdout
    assert "finished 60" in result.stdout


def test_simulate_takes_the_spec_that_tandem_up_takes(tmp_path: Path) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text("models: [{source: llama-3-8b, prefill: {workers: 2}, decode: {workers: 3}}]\n")
    result = run("simulate", *TRAFFIC, "--device", "h100", "--config", str(spec), "--json")
    assert {name: pool["workers"] for name, pool in json.loads(result.stdout)["pools"].items()} == {
        "prefill": 2,
        "decode": 3,
    }


def test_plan_writes_values_and_report_and_goes_on_from_its_state(tmp_path: Path) -> None:
    values, report, state = tmp_path / "values.yaml", tmp_path / "report.html", tmp_path / "state.jsonl"
    goal = ["--ttft", "0.5", "--tpot", "0.03", "--devices", "2", "--simulated", "50", "--step-tokens", "2048"]
    outputs = ["--values", str(values), "--source", "/models/llama", "--report", str(report), "--state", str(state)]
    first = run("plan", *TRAFFIC, *MODEL, *goal, *outputs, "--jobs", "1")
    assert first.exit_code == 0, first.output
    assert "The plan:" in first.stdout
    head = first.stdout.splitlines()[0]
    assert "for synthetic, " in head
    assert "requests/s (the busiest 50 of 60 requests)" in head
    assert first.stdout.count("synthetic") == 1
    spec = ClusterSpec.model_validate(yaml.safe_load(values.read_text())["cluster"])
    assert spec.models[0].source == "/models/llama"
    assert report.read_text().startswith("<!doctype html>")
    lines = state.read_text()
    again = run("plan", *TRAFFIC, *MODEL, *goal, "--state", str(state), "--jobs", "1")
    assert again.stdout == first.stdout
    assert state.read_text() == lines  # nothing was simulated again


def test_a_goal_that_nothing_meets_has_an_exit_code_of_its_own() -> None:
    result = run("plan", *TRAFFIC, *MODEL, "--ttft", "0.001", "--devices", "2", "--jobs", "1", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["miss"]["limit"] == "prefill_time"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "no-such-file.csv", *MODEL], "expected a trace"),
        (["simulate", "synthetic", *MODEL], "--arrivals and --lengths"),
        (["simulate", *TRAFFIC, "--model", "gpt-9"], "llama-3-8b"),
        (["simulate", *TRAFFIC, "--model", "llama-3-8b", "--device", "abacus"], "a100"),
        (["simulate", *TRAFFIC, "--model", "llama-3-70b", "--device", "h100"], "expected more ranks than 1"),
        (["simulate", *TRAFFIC, *MODEL, "--load", "0"], "factors above 0"),
        (["simulate", *TRAFFIC, *MODEL, "--cost", "nothing.json"], "nothing.json"),
        (["plan", *TRAFFIC, *MODEL], "expected an objective"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_was_expected(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, TandemError)
    assert said in result.exception.message
    assert "\n" not in result.exception.message


@pytest.mark.parametrize("text", ["poisson", "poisson:x", "gamma:1", "often:3", "ramp:1:2"])
def test_arrivals_of_no_known_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="poisson:RATE"):
        parse_arrivals(text)


def test_a_width_that_the_model_cannot_be_cut_into_is_refused_by_its_field() -> None:
    widths = ["--prefill-tp", "4", "--decode-tp", "3"]
    result = run("simulate", *TRAFFIC, "--model", "llama-3-70b", "--device", "h100", *widths)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "decode.tp"
    assert "expected one of 1, 2, 4, 8, 16, 32, 64 for llama-3-70b, got 3" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got an empty file"),
        ("name,age\n", "expected JSON lines or columns TIMESTAMP,ContextTokens,GeneratedTokens or"),
        ("prompt_tokens,output_tokens\n9,9\n", "expected --arrivals, such as poisson:2"),
    ],
)
def test_a_file_that_is_no_trace_is_told_from_one_without_arrivals(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    result = run("simulate", str(tmp_path / "t.csv"), *MODEL)
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


def test_a_cpu_serves_fp32_unless_told_otherwise() -> None:
    def kv_bytes(*more: str) -> float:
        result = run("simulate", *TRAFFIC, "--model", "smollm2-135m", "--device", "cpu", "--json", *more)
        assert result.exit_code == 0, result.output
        return float(json.loads(result.stdout)["kv_bytes_moved"])

    assert kv_bytes() == kv_bytes("--element-bytes", "4") == 2 * kv_bytes("--element-bytes", "2")
