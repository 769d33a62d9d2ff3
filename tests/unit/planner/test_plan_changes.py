"""What `tandem compare` says of two plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.planning.compare import run_compare
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.goal import Goal
from planner.search.plan import SearchOptions, make_plan
from planner.search.plan_changes import NOTHING, PlanChanges
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from tandem.errors import InputError


def plan(rate: float, device: str = "h100", tpot_s: float = 0.03) -> dict[str, Any]:
    trace = synthetic_trace(90, Gamma(rate), LengthSpec(1500, 0.5), LengthSpec(60, 0.5), seed=2)
    hardware = Hardware(find_model("llama-3-8b"), find_device(device))
    found = make_plan(trace, hardware, Goal(Slo(0.5, tpot_s), 0.9, 4, (2048,)), SearchOptions(80))
    fields: dict[str, Any] = json.loads(json.dumps(found.to_json() | {"cost_model": f"roofline of {device}"}))
    return fields


@pytest.fixture(scope="module")
def plans() -> tuple[dict[str, Any], dict[str, Any]]:
    return plan(4.0), plan(40.0, tpot_s=0.02)


def test_what_was_asked_otherwise_and_what_came_of_it(plans: tuple[dict[str, Any], dict[str, Any]]) -> None:
    a, b = plans
    found = PlanChanges.between(a, b)
    asked = {what: (one, other) for what, one, other in found.asked}
    assert asked["TPOT objective"] == ("0.03 s", "0.02 s")
    assert asked.keys() <= {"TPOT objective", "load", "traffic"}
    assert found.layouts[0] != found.layouts[1]
    rows = {each.metric: each for each in found.rows}
    devices = rows["devices"]
    assert devices.b is not None
    assert devices.a is not None
    assert devices.b > devices.a
    deployed = rows["per hour, the whole trace, as deployed"]
    assert (deployed.a, deployed.b) == tuple(each["chosen"]["deployed"]["per_hour"] for each in plans)
    conditions = {each.metric: each for each in found.conditions}
    assert conditions["as planned"].a == a["chosen"]["joint"]
    assert {"load +25 %", "steps slower, as far as they may be", "resampled traces, second worst"} <= conditions.keys()


def test_prices_and_settings_of_the_search_are_told(plans: tuple[dict[str, Any], dict[str, Any]]) -> None:
    a, _ = plans
    goal = {"step_tokens": [512, 2048], "bounds_steps": True, "whole_machines": True, "max_running_requests": 64}
    dearer = a | {"price_per_hour": 4.5, "goal": a["goal"] | goal}
    assert PlanChanges.between(a, dearer).asked == (
        ("price per device and hour", "$3", "$4.5"),
        ("whole machines", "no", "yes"),
        ("tokens of a step, at most", "2048", "512, 2048"),
        ("bounded steps", "no", "yes"),
        ("running requests of a worker, at most", "256", "64"),
    )
    of_role = {role: {"price_per_hour": price} for role, price in (("prefill", 3.0), ("decode", 3.8))}
    mixed = {name: value for name, value in a.items() if name != "price_per_hour"} | {"of_role": of_role}
    assert PlanChanges.between(a, mixed).asked == (("price per device and hour", "$3", "prefill $3, decode $3.8"),)


def test_a_plan_and_itself_differ_in_nothing(plans: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found = PlanChanges.between(plans[0], plans[0])
    assert not found.asked
    assert {each.percent or each.points or 0.0 for each in (*found.rows, *found.conditions)} == {0.0}


def test_a_plan_that_found_nothing_is_compared_too(plans: tuple[dict[str, Any], dict[str, Any]]) -> None:
    nothing = plan(4.0, tpot_s=0.0001)
    found = PlanChanges.between(plans[0], nothing)
    assert found.layouts[1] == NOTHING
    assert all(each.b is None for each in (*found.rows, *found.conditions))


def test_the_table_the_json_and_the_page(
    plans: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, each in zip((old, new), plans, strict=True):
        path.write_text(json.dumps(each))
    page = tmp_path / "changes.html"
    assert run_compare(old, new, as_json=False, report=page) == 0
    said = capsys.readouterr().out
    assert "asked otherwise: TPOT objective: 0.03 s, then 0.02 s" in said
    written = page.read_text()
    assert "became" in written
    assert "TPOT objective" in written
    assert written.count("class='chart'") == 2
    assert len(written) < 3_000_000
    assert run_compare(old, new, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked"][-1]["what"] == "TPOT objective"
    assert found["layouts"].keys() == {"a", "b"}


def test_a_plan_is_compared_with_a_plan_only(plans: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    one, other, broken = (tmp_path / name for name in ("plan.json", "result.json", "broken.json"))
    one.write_text(json.dumps(plans[0]))
    other.write_text('{"ttft_s": {}, "tpot_s": {}, "slo": {}}')
    broken.write_text(json.dumps(plans[0] | {"finalists": [], "chosen": {"job": {}, "joint": 1}}))
    with pytest.raises(InputError, match=r"plan.json: expected .* got a plan: compare it with a plan"):
        run_compare(other, one, as_json=False)
    with pytest.raises(InputError, match="expected plans of this version of Tandem"):
        run_compare(one, broken, as_json=False)
    with pytest.raises(InputError, match="--report: expected two results of `tandem plan --json`"):
        run_compare(other, other, as_json=False, report=tmp_path / "page.html")
