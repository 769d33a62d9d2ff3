"""`tandem simulate` and `tandem plan` as a user types them."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import planner.devices
from cluster.cli.commands.planning.inputs import (
    HardwareFlags,
    TrafficFlags,
    load_traffic,
    parse_arrivals,
    write_result,
)
from cluster.cli.commands.planning.plan import cost_model_of
from cluster.cli.commands.planning.simulate import ClusterFlags, load_simulation
from cluster.cli.main import app
from planner.devices import find_device
from planner.fitted import FittedCostModel, PiecewisePlane, Plane
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.goal import Goal
from planner.search.plan import SearchOptions, make_plan
from planner.shapes import LinkShape
from planner.simulator.setup import Slo
from planner.simulator.simulate import simulated_times
from planner.traces.jsonl import write_request_log
from planner.traces.trace import MeasuredTimes
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError, TandemError

TRAFFIC = ["synthetic", "--arrivals", "poisson:4", "--lengths", "600:30", "--requests", "60"]
MODEL = ["--model", "llama-3-8b", "--device", "h100"]
LONG = ["synthetic", "--arrivals", "poisson:4", "--lengths", "9000:30", "--model", "llama-2-7b", "--device", "h100"]
VALUES = ["--source", "org/model", "--values", "never.yaml"]
SPARSE = ["--model", "mixtral-8x7b", "--device", "h200"]


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


def test_simulate_places_by_the_rule_of_a_paper() -> None:
    goal = ["--ttft", "1", "--tpot", "0.05"]
    result = run("simulate", *TRAFFIC, *MODEL, "--paper", "laps", *goal, "--json")
    report = json.loads(result.stdout)
    assert (report["paper"], report["handoffs"]) == ("laps", 60)
    assert "1 device, placed by ecoserve" in run(
        "simulate", *TRAFFIC, *MODEL, "--prefill", "0", "--paper", "ecoserve", *goal
    ).stdout.replace("\n", " ")
    result = run("simulate", *TRAFFIC, *MODEL, "--paper", "orca")
    assert isinstance(result.exception, ConfigError)
    expected = "--paper: expected one of deflection, ppd, laps, ecoserve, taichi, got 'orca'"
    assert result.exception.message == expected


def test_simulate_takes_the_spec_that_tandem_up_takes(tmp_path: Path) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text("models: [{source: llama-3-8b, prefill: {workers: 2}, decode: {workers: 3}}]\n")
    result = run("simulate", *TRAFFIC, "--device", "h100", "--config", str(spec), "--json")
    assert {name: pool["workers"] for name, pool in json.loads(result.stdout)["pools"].items()} == {
        "prefill": 2,
        "decode": 3,
    }


def test_classes_that_the_router_lacks_are_noted(tmp_path: Path) -> None:
    rows = [{"arrival_s": at, "prompt_tokens": 50, "output_tokens": 5, "class": f"c{at % 3}"} for at in range(9)]
    log, spec = tmp_path / "users.jsonl", tmp_path / "cluster.yaml"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec.write_text("router: {classes: [{name: c0}, {name: c1}]}\n")
    said = [
        json.loads(run("simulate", str(log), *MODEL, *more, "--json").stdout)["notes"]
        for more in ((), ("--config", str(spec)))
    ]
    assert said[0][-1].startswith(
        "9 of 9 requests have a class that router.classes lacks (c0, c1, c2): a router rejects"
    )
    assert said[1][-1].startswith("3 of 9 requests have a class that router.classes lacks (c2)")
    assert said[1][-1].endswith("here they are c0")
    rows[0]["class"] = "My class"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    refused = run("plan", str(log), *MODEL, "--ttft", "1", "--source", "org/m", "--values", str(tmp_path / "v.yaml"))
    assert "--values: expected classes of the trace" in str(refused.exception)


def test_plan_writes_values_and_report_and_goes_on_from_its_state(tmp_path: Path) -> None:
    values, report, state = tmp_path / "values.yaml", tmp_path / "report.html", tmp_path / "state.jsonl"
    goal = ["--ttft", "0.5", "--tpot", "0.03", "--devices", "2", "--simulated", "50", "--step-tokens", "2048"]
    outputs = ["--values", str(values), "--source", "/models/llama", "--report", str(report), "--state", str(state)]
    first = run("plan", *TRAFFIC, *MODEL, *goal, *outputs, "--jobs", "1")
    assert first.exit_code == 0, first.output
    assert "The plan:" in first.stdout
    head = first.stdout.splitlines()[0]
    assert "for synthetic, " in head
    assert "requests/s (the busiest 50 of 60 requests: 12 s from second 4)" in head
    assert first.stdout.count("synthetic") == 1
    spec = ClusterSpec.model_validate(yaml.safe_load(values.read_text())["cluster"])
    assert spec.models[0].source == "/models/llama"
    assert report.read_text().startswith("<!doctype html>")
    lines = state.read_text()
    again = run("plan", *TRAFFIC, *MODEL, *goal, "--state", str(state), "--jobs", "1")
    assert again.stdout == first.stdout
    assert state.read_text() == lines  # nothing was simulated again


def test_a_plan_with_bounded_steps_names_the_longest() -> None:
    goal = ["--ttft", "0.5", "--devices", "1", "--simulated", "50", "--step-tokens", "2048", "--bounded-steps"]
    assert "--bounded-steps: expected --tpot with it" in str(run("plan", *TRAFFIC, *MODEL, *goal).exception)
    shown = run("plan", *TRAFFIC, *MODEL, *goal, "--tpot", "0.03", "--jobs", "1").stdout
    assert "note: with engine.longest_step_s: 0.03" in shown


def test_the_largest_load_and_how_long_a_plan_lasts_are_printed(tmp_path: Path) -> None:
    goal = ["--ttft", "0.5", "--tpot", "0.01", "--devices", "1", "--simulated", "50", "--step-tokens", "2048"]
    planned = run("plan", *TRAFFIC, *MODEL, *goal, "--jobs", "1", "--growth", "0.1", "--json")
    lasts = json.loads(planned.stdout)["headroom"]
    assert (lasts["of"], lasts["growth"]) == ("the plan", 0.1)
    shown = run("plan", *TRAFFIC, *MODEL, *goal, "--jobs", "1", "--max-load", "--growth", "0.1").stdout
    assert f"largest load for up to 1 x h100: x {lasts['load']:g}, " in shown, "one device has one layout"
    assert f"at load x {lasts['missed_at']:g} the goal is missed" in shown
    assert f"traffic that grows by 10 % a month reaches it after {lasts['months']:.1f} months" in shown
    assert f"note: load x {lasts['load']:g}\n" in shown
    report = tmp_path / "report.html"
    found = run("plan", *TRAFFIC, *MODEL, *goal, "--jobs", "1", "--max-load", "--report", str(report), "--json")
    assert [each["job"]["load"] for each in json.loads(found.stdout)["grid"]] == [lasts["load"]]
    assert "Other numbers of workers" in report.read_text()


def test_a_schedule_shows_the_pools_of_each_part_and_what_they_save() -> None:
    traffic = ["synthetic", "--arrivals", "ramp:1:30:12", "--lengths", "900:20", "--requests", "160"]
    goal = ["--ttft", "0.5", "--tpot", "0.03", "--devices", "4", "--simulated", "80", "--step-tokens", "2048"]
    refused = run("plan", *traffic, *MODEL, *goal, "--schedule", "4")
    assert "--schedule: expected at least 50 requests in a part" in str(refused.exception)
    asked = ["plan", *traffic, *MODEL, *goal, "--jobs", "1", "--schedule", "2"]
    found = json.loads(run(*asked, "--json").stdout)["schedule"]
    assert [each["requests"] for each in found["parts"]] == sorted(each["requests"] for each in found["parts"])
    shown = run(*asked).stdout
    assert "The plan's pools over time" in shown
    assert f"by this schedule {found['devices']:.1f} instead of {found['fixed_devices']} devices" in shown


def test_the_rows_of_one_model_are_simulated(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time,model,input_tokens,output_tokens\n" + "".join(f"{at},m{at % 3},100,9\n" for at in range(30)))
    everything = json.loads(run("simulate", str(log), *MODEL, "--json").stdout)
    assert everything["requests"] == 30
    assert everything["notes"][0].startswith("model has 3 values (m0 33.3%, m1 33.3%, m2 33.3%)")
    chosen = json.loads(run("simulate", str(log), *MODEL, "--where", "model=m1", "--json").stdout)
    assert chosen["requests"] == 10
    assert chosen["notes"][0] == "rows with model=m1: 10 of 30"


def test_a_source_is_refused_without_the_file_that_it_is_for() -> None:
    result = run("plan", *TRAFFIC, *MODEL, "--ttft", "1", "--source", "org/model")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith("--source: expected together with --values")


@pytest.mark.parametrize("option", ["--report", "--values", "--state"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path, option: str) -> None:
    for path in (tmp_path / "nowhere" / "file", tmp_path):
        source = ["--source", "/models/llama"] if option == "--values" else []
        result = run("plan", *TRAFFIC, *MODEL, "--ttft", "1", option, str(path), *source)
        assert isinstance(result.exception, InputError)
        assert result.exception.message == f"{option}: expected a file that can be written, got {path}"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("bench", *TRAFFIC, "--output"), "--output"),
        (("bench", *TRAFFIC, "--compare", "batching", "--output"), "--output"),
        (("profile",), "output"),
        (("compare", "a.json", "b.json", "--report"), "--report"),
    ],
)
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    path = tmp_path / "nowhere" / "file"
    result = run(*command, str(path))
    assert isinstance(result.exception, InputError)
    assert result.exception.message == f"{option}: expected a file that can be written, got {path}"


def test_a_device_without_a_price_is_not_the_cheapest_of_several(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    text = (Path(planner.devices.__file__).parent / "h100.yaml").read_text().replace("name: h100", "name: mine")
    mine.write_text("".join(line for line in text.splitlines(keepends=True) if "price" not in line))
    result = run("plan", *TRAFFIC, "--model", "llama-3-8b", "--device", f"h100,{mine}", "--ttft", "1")
    assert isinstance(result.exception, ConfigError)
    assert "--device: mine: price_per_hour: expected a price" in result.exception.message


def test_the_step_times_that_are_told_are_those_of_the_plans_workers() -> None:
    """A dearer layout of wider workers may meet the goal better."""
    trace = load_traffic(TrafficFlags("synthetic", "poisson:4", "600:30"))
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    plan = make_plan(trace, hardware, Goal(Slo(1.0), max_devices=1), SearchOptions(50))
    assert plan.chosen is not None
    wider = replace(plan.chosen.job, layout=replace(plan.chosen.layout, decode_tp=2))
    plan = replace(plan, finalists=(replace(plan.chosen, job=wider), plan.chosen))
    steps = FittedCostModel(PiecewisePlane((Plane(0.1, 0, 0),)), PiecewisePlane((Plane(0.1, 0, 0),)), LinkShape(1e9))
    measured = replace(hardware, measured={tp: replace(steps, fit_error=tp / 100) for tp in (1, 2)})
    assert cost_model_of(plan, measured) == "measured at TP 1: mean fit error 1.0%"
    assert cost_model_of(replace(plan, chosen=None), measured) == "measured at TP 2: mean fit error 2.0%"


def test_a_goal_that_nothing_meets_has_an_exit_code_of_its_own() -> None:
    result = run("plan", *TRAFFIC, *MODEL, "--ttft", "0.001", "--devices", "2", "--jobs", "1", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["miss"]["limit"] == "prefill_time"


def test_simulate_takes_a_device_for_each_role() -> None:
    goal = ["--ttft", "1", "--tpot", "0.05", "--json"]
    mixed = ["--device", "h200", "--prefill-device", "h100"]
    found = json.loads(run("simulate", *TRAFFIC, "--model", "llama-3-8b", *mixed, *goal).stdout)
    assert found["cost_model"].startswith("prefill: roofline of h100 (")
    assert "; decode: roofline of h200 (" in found["cost_model"]
    ours = json.loads(run("simulate", *TRAFFIC, *MODEL, *goal).stdout)
    other_way = run("simulate", *TRAFFIC, *MODEL, "--decode-device", "h200", *goal)
    assert json.loads(other_way.stdout) == found
    assert found["tpot_s"]["p50"] < 0.9 * ours["tpot_s"]["p50"], "more memory bandwidth"


PAIRS = ["--model", "llama-3-8b", "--device", "h100,h200", "--mix-roles", "--jobs", "1"]


def test_pairs_of_devices_are_planned_beside_each_alone(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    goal = ["--ttft", "0.5", "--tpot", "0.03", "--devices", "2", "--simulated", "50", "--step-tokens", "2048"]
    cheap = ["--price", "h100=1,h200=9", "--values", str(values), "--source", "/models/llama"]
    found = json.loads(run("plan", *TRAFFIC, *PAIRS, *goal, *cheap, "--json").stdout)
    assert [each["device"] for each in found["choices"]] == ["h100", "h200", "h100:h200", "h200:h100"]
    assert [each["per_hour"] for each in found["choices"]] == [1, 9, 10, 10]
    assert found["device"] == "h100"
    assert "nodeGroups" not in yaml.safe_load(values.read_text())
    shown = run("plan", *TRAFFIC, *PAIRS, *goal, "--growth", "0.1").stdout
    assert "│ h200:h100 │" in shown
    assert "load x" not in shown.partition("h200:h100")[0], "of the plan alone"


@pytest.mark.slow
def test_the_largest_load_of_pairs_is_looked_for_too() -> None:
    goal = ["--ttft", "0.5", "--tpot", "0.01", "--devices", "2", "--simulated", "50", "--step-tokens", "2048"]
    found = json.loads(run("plan", *TRAFFIC, *PAIRS, *goal, "--max-load", "--json").stdout)
    loads = [each["load"] for each in found["choices"]]
    assert len(loads) == 4
    assert loads == sorted(loads, reverse=True)
    assert found["headroom"]["load"] == loads[0]
    assert "load x" in run("plan", *TRAFFIC, *PAIRS, *goal, "--max-load").stdout


@pytest.mark.slow
def test_of_several_devices_the_cheapest_is_the_plan() -> None:
    """The dearer ones, and those that the model does not fit on, are beside it."""
    goal = ["--ttft", "0.5", "--tpot", "0.03", "--devices", "1", "--simulated", "50", "--step-tokens", "2048"]
    both = ["--model", "llama-3-8b", "--device", "h200,h100"]
    found = json.loads(run("plan", *TRAFFIC, *both, *goal, "--jobs", "1", "--json").stdout)
    assert [each["device"] for each in found["choices"]] == ["h100", "h200"]
    assert found["device"] == "h100"
    prices = [each["per_hour"] for each in found["choices"]]
    assert prices == sorted(prices)
    assert [each["devices"] for each in found["choices"]] == [1, 1]
    told = json.loads(
        run("plan", *TRAFFIC, *both, *goal, "--jobs", "1", "--json", "--price", "h100=9.5, H200=3.25").stdout
    )
    assert [(each["device"], each["per_hour"]) for each in told["choices"]] == [("h200", 3.25), ("h100", 9.5)]
    large = ["--model", "llama-3-70b", "--device", "h100,h200", *goal]
    result = run("plan", *TRAFFIC, *large, "--jobs", "1")
    assert isinstance(result.exception, ConfigError)
    assert "does not fit on 1 x h100" in result.exception.message
    one_fits = ["--model", "llama-3-70b", "--device", "h100,b200", *goal, "--ttft", "9", "--tpot", "0.2"]
    shown = run("plan", *TRAFFIC, *one_fits, "--jobs", "1")
    assert shown.exit_code == 0, shown.output
    assert "llama-3-70b on up to 1 x b200" in shown.stdout
    assert "does not fit on 1 x h100" in " ".join(shown.stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["plan", *TRAFFIC, "--model", "llama-3-8b", "--device", "h100,h200", "--ttft", "1", "--price", "3"],
            "--price: expected a price by device, such as h100=2.5,h200=2.5, got '3'",
        ),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "h200=3"], "a device of --device (h100), got 'h200'"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "h100=3,H100=4"], "expected one price for h100"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "h100=cheap"], "dollars above 0, such as 2.5"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "h100=0"], "dollars above 0, such as 2.5"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "-1"], "dollars above 0, such as 2.5"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "h100=3,4"], "DEVICE=DOLLARS with commas"),
        (
            ["plan", *TRAFFIC, "--model", "llama-3-8b", "--device", "h100,", "--ttft", "1"],
            "such as h100,h200, got 'h100,'",
        ),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--confidence", "2"], "--confidence: expected a share"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--growth", "5"], "--growth: expected a share above 0"),
        (["plan", *TRAFFIC, *MODEL, "--tpot", "1", "--growth", "0.1"], "--growth: expected --ttft with it"),
        (["plan", *TRAFFIC, *MODEL, "--tpot", "1", "--max-load"], "--max-load: expected --ttft with it"),
        (
            ["plan", *TRAFFIC, "--model", "llama-3-8b", "--device", "h100,h200", "--ttft", "1", "--max-load"],
            "--max-load: expected one --device with it, got h100,h200",
        ),
        (["simulate", "no-such-file.csv", *MODEL], "expected a trace"),
        (["simulate", "synthetic", *MODEL], "--arrivals and --lengths"),
        (["simulate", *TRAFFIC, *MODEL, "--prefixes", "4.7:500:1"], "whole numbers, got '4.7:500:1'"),
        (["simulate", *TRAFFIC, *MODEL, "--prefixes", "4:500.5:1"], "whole numbers, got '4:500.5:1'"),
        (["simulate", *TRAFFIC, *MODEL, "--prefixes", "inf:16:0.5"], "whole numbers, got 'inf:16:0.5'"),
        (["simulate", *TRAFFIC, *MODEL, "--prefixes", "4:nan:0.5"], "whole numbers, got '4:nan:0.5'"),
        (["simulate", *TRAFFIC, *MODEL, "--lengths", "100:10:1e200:0"], "cv: expected 0 to 100, got 1e+200"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--where", "model=a"], "--where: expected none with a synthetic"),
        (["simulate", *TRAFFIC, "--model", "gpt-9"], "llama-3-8b"),
        (["simulate", *TRAFFIC, "--model", "llama-3-8b", "--device", "abacus"], "a100"),
        (["simulate", *TRAFFIC, "--model", "llama-3-70b", "--device", "h100"], "expected more ranks than 1"),
        (["simulate", *TRAFFIC, *MODEL, "--load", "0"], "--load: expected a factor above 0"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--load", "inf"], "--load: expected a factor above 0"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--price", "inf"], "--price: expected dollars"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--kv-bytes", "0"], "--kv-bytes: expected more than 0"),
        (["plan", *TRAFFIC, *MODEL, "--ttft", "1", "--expert-bytes", "1"], "--expert-bytes: expected none"),
        (["plan", *TRAFFIC, *SPARSE, "--ttft", "1", "--expert-bytes", "0"], "--expert-bytes: expected more than 0"),
        (
            ["plan", *TRAFFIC, *SPARSE, "--ttft", "1", "--expert-bytes", "1", *VALUES],
            "--expert-bytes: expected experts of 2 bytes",
        ),
        (
            ["plan", *TRAFFIC, "--model", "gpt-oss-20b", "--ttft", "1", *VALUES],
            "--values: Tandem's engine does not serve gpt-oss-20b (it lacks attention sinks)",
        ),
        (["simulate", *TRAFFIC, *MODEL, "--cost", "nothing.json"], "nothing.json"),
        (["plan", *TRAFFIC, *MODEL], "expected an objective"),
        (["plan", *LONG, "--ttft", "9"], "synthetic: expected prompts of fewer than 4,096 tokens, the context, got at"),
        (["simulate", *LONG], "or raise engine.max_model_tokens if the spec sets it"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_was_expected(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, TandemError)
    assert said in result.exception.message
    assert "\n" not in result.exception.message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("five.json", "5", "five.json: expected a JSON object"),
        ("list.json", "[1]", "list.json: expected a JSON object"),
        ("none.json", '{"widths": []}', "none.json: expected step times of one TP width or more, got none"),
        ("text.json", "no", "text.json: expected a JSON object"),
        ("t.csv:a/b", "", "t.csv, line 1: expected a column model"),
        ("none.csv:a/b", None, "none.csv: No such file or directory"),
    ],
)
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name.partition(":")[0]).write_text(text)
    result = run("simulate", *TRAFFIC, *MODEL, "--cost", str(tmp_path / name))
    assert isinstance(result.exception, ConfigError)
    assert said in result.exception.message


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
        ("name,age\n", "expected JSON lines, or columns num_prefill_tokens,num_decode_tokens or"),
        ("prompt_tokens,output_tokens\n9,9\n", "expected --arrivals, such as poisson:2"),
    ],
)
def test_a_file_that_is_no_trace_is_told_from_one_without_arrivals(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    result = run("simulate", str(tmp_path / "t.csv"), *MODEL)
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


def test_a_model_with_experts_is_planned_by_those_that_its_tokens_choose() -> None:
    """As fast as its active parameters make it, and no smaller than all of them."""

    def simulated(model: str) -> dict[str, Any]:
        result = run("simulate", *TRAFFIC, "--model", model, "--device", "h200", "--json")
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    sparse, dense = simulated("qwen3-30b-a3b"), simulated("qwen3-32b")
    assert sparse["tpot_s"]["p50"] < 0.6 * dense["tpot_s"]["p50"]
    assert "TPOT 14 % off measurements" in sparse["cost_model"]
    lacking = simulated("gpt-oss-20b")["cost_model"]
    assert lacking.endswith("Tandem's engine does not serve gpt-oss-20b: it lacks attention sinks")


def test_a_cpu_serves_fp32_unless_told_otherwise() -> None:
    def kv_bytes(*more: str) -> float:
        result = run("simulate", *TRAFFIC, "--model", "smollm2-135m", "--device", "cpu", "--json", *more)
        assert result.exit_code == 0, result.output
        return float(json.loads(result.stdout)["kv_bytes_moved"])

    assert kv_bytes() == kv_bytes("--element-bytes", "4") == 2 * kv_bytes("--element-bytes", "2")


RECORDED = TrafficFlags("synthetic", "poisson:4", "600:12:0.9:0.3", requests=210)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    """Has a recording whose requests took 1.4 times the simulated TTFT and twice the simulated TPOT."""
    loaded = load_simulation(RECORDED, HardwareFlags("llama-3-8b", "h100"), ClusterFlags())
    times = simulated_times(loaded.trace, loaded.setup)
    measured = MeasuredTimes(1.4 * times.ttft_s, 2.0 * times.decode_s)
    write_request_log(replace(loaded.trace, measured=measured), folder / "users.jsonl")
    result = run("calibrate", str(folder / "users.jsonl"), *MODEL, "-o", str(folder / "c.json"))
    assert result.exit_code == 0, result.output
    (folder / "said.txt").write_text(result.stdout)
    return folder


class TestCalibrate:
    def test_it_shows_the_corrections_and_their_error(self, folder: Path) -> None:
        said = (folder / "said.txt").read_text()
        found = json.loads((folder / "c.json").read_text())
        assert found["decode"] == pytest.approx(2.0, rel=0.02)
        assert f"decode steps x {found['decode']:.3f}" in said
        assert {"TTFT p50", "TPOT p90", "end to end p95"} <= {
            line[2:].split(" │")[0].strip() for line in said.split("\n")
        }
        assert f"off by {found['held_out']['error']:.0%} on average, {found['held_out']['error_before']:.0%}" in said

    def test_simulate_corrects_with_it_and_says_so(self, folder: Path) -> None:
        plain, corrected = (
            json.loads(run("simulate", *TRAFFIC, *MODEL, *more, "--json").stdout)
            for more in ((), ("--calibration", str(folder / "c.json")))
        )
        assert corrected["tpot_s"]["p50"] == pytest.approx(2.0 * plain["tpot_s"]["p50"], rel=0.1)
        assert corrected["cost_model"].startswith("calibrated with 210 requests: prefill x ")
        assert corrected["calibration"]["held_out"]["requests"] < 210
        assert "calibration" not in plain
        shown = run("simulate", *TRAFFIC, *MODEL, "--calibration", str(folder / "c.json"), "--decode-tp", "2").stdout
        assert "for TP 2 the same factors are an assumption" in shown.replace("\n", " ")

    def test_a_plan_takes_its_error_for_slower_steps(self, folder: Path, tmp_path: Path) -> None:
        report, goal = tmp_path / "plan.html", ("--devices", "2", "--ttft", "2", "--tpot", "0.1", "--simulated", "60")
        calibration = ("--calibration", str(folder / "c.json"))
        result = run("plan", *TRAFFIC, *MODEL, *goal, *calibration, "--jobs", "1", "--report", str(report), "--json")
        assert result.exit_code == 0, result.output
        plan, error = json.loads(result.stdout), json.loads((folder / "c.json").read_text())["held_out"]["error"]
        assert f"steps {100 * error:.0f} % slower" in {each["name"] for each in plan["variants"]}
        assert plan["calibration"]["decode"] == pytest.approx(2.0, rel=0.02)
        assert "calibrated with 210 requests" in plan["cost_model"]
        assert "calibrated with 210 requests" in report.read_text()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--model", "llama-3-8b", "--device", "h200"), "made for device h200, got one for h100"),
            (("--model", "llama-2-7b", "--device", "h100"), "made for model llama-2-7b, got one for llama-3-8b"),
            ((*MODEL, "--element-bytes", "1"), "expected the cost model that it corrects"),
        ],
    )
    def test_it_holds_for_nothing_else(self, folder: Path, options: tuple[str, ...], said: str) -> None:
        result = run("simulate", *TRAFFIC, *options, "--calibration", str(folder / "c.json"))
        assert isinstance(result.exception, ConfigError)
        assert said in result.exception.message

    def test_a_recording_without_times_writes_nothing(self, folder: Path, tmp_path: Path) -> None:
        write_request_log(load_traffic(RECORDED), tmp_path / "old.jsonl")
        result = run("calibrate", str(tmp_path / "old.jsonl"), *MODEL, "-o", str(tmp_path / "c.json"))
        assert isinstance(result.exception, InputError)
        assert "old.jsonl: expected requests with measured times" in result.exception.message
        assert not (tmp_path / "c.json").exists()

    def test_a_file_that_cannot_be_written_is_refused_before_the_simulations(self, folder: Path) -> None:
        result = run("calibrate", str(folder / "users.jsonl"), *MODEL, "-o", str(folder / "none" / "c.json"))
        assert isinstance(result.exception, InputError)
        assert "--output: expected a file that can be written" in result.exception.message


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "measured.json"
    write_result("--output", output, "earlier")
    write_result("--output", Path("/dev/null"), "later")
    assert Path("/dev/null").is_char_device()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=f"^--output: {output}: No space left on device$"):
        write_result("--output", output, "later")
    assert output.read_text() == "earlier\n"
