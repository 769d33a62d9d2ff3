"""Objectives of classes: each class is held against its own, and a plan against the class that does worst."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.cli.commands.planning.inputs import TrafficFlags, load_traffic, parse_slo
from planner.devices import find_device
from planner.hardware import Hardware, make_setup
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.goal import Goal
from planner.search.plan import SearchOptions, make_plan
from planner.simulator.measurements import RunMeasurements
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.trace import TrafficTrace
from tandem.config.router import RouterSpec
from tandem.errors import ConfigError

COUNT = 300


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@pytest.fixture(scope="module")
def trace() -> TrafficTrace:
    """Every third request is of a class whose prompts are eight times as long."""
    label = (np.arange(COUNT) % 3 == 0).astype(np.int32)
    prompts = np.where(label == 1, 8000, 1000)
    labels = (("chat", ""), ("long", ""))
    return TrafficTrace("t", np.arange(COUNT) / 6.0, prompts, np.full(COUNT, 100), labels=labels, label=label)


def one_worker(hardware: Hardware) -> Setup:
    sizes = {"max_running_requests": 256, "max_step_tokens": 2048, "block_tokens": 16}
    return make_setup(hardware, None, hardware.pool(1, 1), router=RouterSpec(), **sizes)


def met(trace: TrafficTrace, hardware: Hardware, slo: Slo) -> dict[str, float]:
    return dict(simulate(trace, one_worker(hardware), slo).attainment.of_class)


def test_each_class_has_its_own_objectives(trace: TrafficTrace, hardware: Hardware) -> None:
    strict, loose = 0.07, 30.0
    assert met(trace, hardware, Slo(ttft_s=strict)) == {}
    found = met(trace, hardware, Slo(ttft_s=strict, of_class=(("long", Slo(ttft_s=loose)),)))
    assert found["long"] == 1.0
    assert found["chat"] < 1.0
    other = met(trace, hardware, Slo(ttft_s=loose, of_class=(("long", Slo(ttft_s=strict)),)))
    assert other["chat"] == 1.0
    assert other["long"] < 0.5


def test_what_is_counted_while_it_runs_is_what_is_counted_at_its_end(trace: TrafficTrace, hardware: Hardware) -> None:
    setup = one_worker(hardware)
    slo = Slo(0.07, 0.02, (("long", Slo(None, 0.05)),))
    whole = simulate(trace, setup, slo)
    assert whole.attainment.joint is not None
    misses = round(COUNT * (1 - whole.attainment.joint))
    assert 0 < misses < COUNT
    assert simulate(trace, setup, slo, most_misses=misses).complete
    assert not simulate(trace, setup, slo, most_misses=misses - 1).complete


def test_a_plan_holds_for_the_class_that_does_worst(trace: TrafficTrace, hardware: Hardware) -> None:
    options = SearchOptions(requests=COUNT)
    loose = Goal(Slo(5.0, 0.1), max_devices=8)
    strict = replace(loose, slo=Slo(5.0, 0.1, (("long", Slo(0.15, 0.1)),)))
    cheap, dear = (make_plan(trace, hardware, goal, options) for goal in (loose, strict))
    assert cheap.chosen is not None
    assert dear.chosen is not None
    assert dear.chosen.layout.devices > cheap.chosen.layout.devices
    assert dear.chosen.joint == min(dear.chosen.of_class.values()) >= 0.95
    page = html_report(dear, "roofline")
    assert "class long: TTFT 0.15 s and TPOT 0.1 s" in page
    assert "within objectives by class" in page
    impossible = make_plan(trace, hardware, replace(strict, slo=Slo(5.0, 0.1, (("long", Slo(0.02, 0.1)),))), options)
    assert impossible.chosen is None
    assert impossible.miss is not None
    assert impossible.miss.explanation


@pytest.mark.parametrize("given", ["long", "batch=", "batch=1", "batch=a,b", "batch=,", "batch=1,2,3", "batch=-1,1"])
def test_objectives_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        parse_slo(None, None, [given])


def test_objectives_are_read_once_for_each_class() -> None:
    assert parse_slo(1.0, None, ["long=30,", "chat=,0.05"]) == Slo(
        1.0, None, (("long", Slo(30.0)), ("chat", Slo(None, 0.05)))
    )
    with pytest.raises(ConfigError, match="once for each class"):
        parse_slo(None, None, ["a=1,1", "a=2,2"])


def test_a_class_that_no_request_has_is_refused_by_name(trace: TrafficTrace, hardware: Hardware) -> None:
    with pytest.raises(ConfigError, match=r"expected a class of the trace \(chat, long\), got bach"):
        make_plan(trace, hardware, Goal(Slo(1.0, 0.1, (("bach", Slo(1.0)),))), SearchOptions(requests=COUNT))
    with pytest.raises(ConfigError, match="got bach"):
        RunMeasurements(trace, Slo(of_class=(("bach", Slo(1.0)),)))


@pytest.mark.parametrize(("general", "rare"), [(Slo(), "long"), (Slo(5.0), "chat")])
def test_a_class_that_the_simulated_part_lacks_is_named(
    trace: TrafficTrace, hardware: Hardware, general: Slo, rare: str
) -> None:
    """Its only request comes a minute after the others; a class without objectives of its own has the general ones."""
    other = {"long": "chat", "chat": "long"}[rare]
    label = np.zeros(COUNT, np.int32)
    label[-1] = 1
    arrival_s, lengths = np.append(trace.arrival_s[:-1], COUNT / 6.0 + 60.0), np.full(COUNT, 1000)
    late = replace(trace, labels=((other, ""), (rare, "")), label=label, arrival_s=arrival_s, prompt_tokens=lengths)
    goal = Goal(replace(general, of_class=(("long", Slo(30.0)),)), max_devices=1, step_tokens=(2048,))
    note = f"the objectives of class {rare} were not checked, because the simulated part has no such request: raise"
    for requests, is_noted in ((COUNT - 1, True), (COUNT, False)):
        plan = make_plan(late, hardware, goal, SearchOptions(requests=requests))
        assert any(note in each for each in plan.to_json()["traffic"]) is is_noted
        assert (note in html_report(plan, "roofline")) is is_noted


def test_a_class_of_which_no_request_was_selected_is_refused(tmp_path: Path, hardware: Hardware) -> None:
    rows = [
        {"arrival_s": at_s, "prompt_tokens": 10, "output_tokens": 10, "class": name}
        for at_s, name in ((0.0, "chat"), (1.0, "chat"), (2.0, "long"))
    ]
    path = tmp_path / "users.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    goal, options = Goal(Slo(1.0, 0.1, (("long", Slo(1.0)),)), max_devices=1), SearchOptions()
    make_plan(load_traffic(TrafficFlags(str(path))), hardware, goal, options)
    with pytest.raises(ConfigError, match=r"expected a class of the trace \(chat\), got long"):
        make_plan(load_traffic(TrafficFlags(str(path), requests=2)), hardware, goal, options)
