"""The search: what it finds is what trying everything finds, and what it says of it can be deployed and opened."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from plotly.offline import get_plotlyjs

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.analytic import Analysis, Limit
from planner.search.evaluate import Evaluation, Evaluator, Job
from planner.search.halving import RUNGS, Effort, halve, select
from planner.search.layout import ClusterLayout, layouts
from planner.search.plan import Goal, Plan, SearchOptions, make_plan
from planner.search.report import html_report
from planner.search.simulation_pool import Journal, SimulationPool
from planner.search.traffic import TrafficShape, busiest
from planner.search.values import helm_values
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError

ROOT = Path(__file__).resolve().parents[3]
GOAL = Goal(Slo(ttft_s=0.4, tpot_s=0.02), attainment=0.9, max_devices=3, step_tokens=(2048,), max_running_requests=128)
EFFORT = Effort(requests=100, per_price=3, finalists=1)


@cache
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@cache
def traffic(rate: float = 12.0) -> TrafficTrace:
    return synthetic_trace(200, Gamma(rate), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)


@cache
def plan() -> Plan:
    return make_plan(traffic(), hardware(), GOAL, SearchOptions(effort=EFFORT))


class TestSearch:
    def test_the_plan_is_the_cheapest_that_trying_everything_finds(self) -> None:
        trace = busiest(traffic(), 100)
        evaluator = Evaluator(trace, hardware(), GOAL.slo, GOAL.max_running_requests)
        tried = [evaluator.evaluate(Job(each, 100)) for each in layouts([1], 3, GOAL.step_tokens)]
        cheapest = min(each.layout.devices for each in tried if each.joint >= GOAL.attainment)
        found = plan().chosen
        assert found is not None
        assert found.layout.devices == cheapest

    def test_it_meets_the_goal_and_says_what_it_costs(self) -> None:
        found = plan()
        assert found.chosen is not None
        assert found.costs is not None
        assert found.chosen.joint >= GOAL.attainment
        assert found.costs.per_hour == found.chosen.layout.devices * 3.0
        tokens_per_hour = found.chosen.tokens_per_s * 3600
        assert found.costs.per_million_tokens == pytest.approx(found.costs.per_hour / tokens_per_hour * 1e6)
        assert found.costs.per_million_tokens_busy is not None
        assert found.costs.per_million_tokens is not None
        assert found.costs.per_million_tokens_busy < found.costs.per_million_tokens

    def test_it_is_tried_under_other_load_lengths_and_with_a_worker_lost(self) -> None:
        found = {each.name: each.evaluation for each in plan().variants}
        assert {"load -25 %", "load +25 %", "prompts +25 %", "answers +25 %"} <= found.keys()
        less, more = found["load -25 %"], found["load +25 %"]
        assert less is not None
        assert more is not None
        assert less.joint >= more.joint

    def test_the_verdict_says_whether_disaggregation_pays(self) -> None:
        assert re.search("disaggregation (pays|does not pay|makes no clear difference)", plan().verdict)

    def test_the_best_of_each_kind_is_compared_to_the_end_at_every_price(self) -> None:
        """Where all finalists of a price would be of one kind, nothing could be said about the other."""
        ranked = [
            (0.1 * number, ClusterLayout(0, 1, 2, 1, tokens)) for number, tokens in enumerate((512, 1024, 2048, 4096))
        ]
        ranked.append((0.9, ClusterLayout(1, 1, 1, 1, 2048)))
        chosen = select(ranked, per_price=2)
        assert [each.is_aggregated for each in chosen] == [True, True, False]
        evaluator = Evaluator(busiest(traffic(4.0), 100), hardware(), GOAL.slo)

        def run(jobs: Sequence[Job]) -> list[Evaluation]:
            return [evaluator.evaluate(each) for each in jobs]

        everything = [layout for _, layout in ranked]
        last = halve(everything, Effort(requests=100, finalists=1), 0.9, run)
        assert {each.layout.is_aggregated for each in last} == {True, False}

    def test_dearer_layouts_are_looked_at_again_when_what_seemed_to_do_does_not(self) -> None:
        """A first round's few requests may say that little is enough."""
        few, many = ClusterLayout(0, 1, 1, 1, 2048), ClusterLayout(0, 1, 2, 1, 2048)
        evaluator = Evaluator(busiest(traffic(4.0), 100), hardware(), GOAL.slo)
        real = evaluator.evaluate(Job(many, 100))
        rounds: list[list[ClusterLayout]] = []

        def run(jobs: Sequence[Job]) -> list[Evaluation]:
            rounds.append([each.layout for each in jobs])
            last = len(rounds) >= len(RUNGS)
            return [replace(real, job=each, joint=0.5 if last and each.layout == few else 1.0) for each in jobs]

        found = halve([few, many], Effort(requests=100), 0.9, run)
        assert rounds == [[few, many], [few], [few], [many]]
        assert [(each.layout, each.joint) for each in found] == [(few, 0.5), (many, 1.0)]

    def test_the_loss_of_the_only_decode_worker_is_no_service(self) -> None:
        chosen = plan().chosen
        assert chosen is not None
        lost = {each.name: each for each in plan().variants}["one decode worker lost"]
        assert (lost.evaluation is None) == (chosen.layout.decode_workers == 1)
        assert "one decode worker lost" in html_report(plan(), "roofline")
        small = make_plan(traffic(3.0), hardware(), GOAL, SearchOptions(effort=EFFORT))
        assert small.chosen is not None
        assert small.chosen.layout.decode_workers == 1
        lost = {each.name: each for each in small.variants}["one decode worker lost"]
        assert (lost.evaluation, lost.meets) == (None, False)

    def test_more_money_buys_more_along_the_frontier(self) -> None:
        frontier = plan().frontier()
        assert [each.layout.devices for each in frontier] == sorted({each.layout.devices for each in frontier})
        assert [each.goodput_per_s for each in frontier] == sorted(each.goodput_per_s for each in frontier)


class TestUnsatisfiable:
    def test_an_objective_beyond_the_hardware_names_the_limit_and_the_excess(self) -> None:
        goal = Goal(Slo(ttft_s=0.01, tpot_s=0.02), max_devices=4, step_tokens=(2048,))
        found = make_plan(traffic(), hardware(), goal, SearchOptions(effort=EFFORT))
        assert found.chosen is None
        assert found.miss is not None
        assert found.miss.limit == Limit.PREFILL_TIME
        assert found.miss.excess is not None
        assert found.miss.excess > 2

    def test_an_objective_missed_in_queues_names_what_the_closest_layout_does(self) -> None:
        goal = Goal(Slo(ttft_s=0.12), 0.99, 2, (2048,))
        found = make_plan(traffic(20.0), hardware(), goal, SearchOptions(effort=EFFORT))
        assert found.chosen is None
        assert found.miss is not None
        assert found.miss.limit in ("ttft", *Limit)
        assert "x" in found.miss.explanation

    def test_a_model_that_does_not_fit_says_so(self) -> None:
        goal = Goal(GOAL.slo, max_devices=1)
        with pytest.raises(ConfigError, match="does not fit on 1 x h100"):
            make_plan(traffic(), Hardware(find_model("llama-3-70b"), find_device("h100")), goal, SearchOptions())

    @pytest.mark.parametrize(
        "build", [lambda: Goal(Slo()), lambda: Goal(GOAL.slo, 1.0), lambda: Goal(GOAL.slo, 0.9, 0)]
    )
    def test_a_goal_that_is_none_is_refused(self, build: object) -> None:
        assert callable(build)
        with pytest.raises(ConfigError):
            build()


class TestBounds:
    def analysis(self) -> Analysis:
        return Analysis(TrafficShape.of(traffic()), hardware(), GOAL.slo, 0.9, 128)

    def test_what_they_rule_out_fails_in_simulation(self) -> None:
        evaluator = Evaluator(busiest(traffic(), 100), hardware(), GOAL.slo, 128)
        hopeless = [each for each in layouts([1], 2, (512,)) if not self.analysis().bounds(each).possible]
        slow = Analysis(TrafficShape.of(traffic(200.0)), hardware(), GOAL.slo, 0.9, 128)
        assert all(evaluator.evaluate(Job(each, 100)).joint < 0.9 for each in hopeless)
        assert slow.bounds(ClusterLayout(1, 1, 1, 1, 2048)).worst[0] is Limit.PREFILL_LOAD

    def test_workers_of_both_roles_share_one_size_of_pool(self) -> None:
        """The spec gives all ranks the same: a narrow prefill worker leaves a wide decode worker little."""
        big = Hardware(find_model("llama-3-70b"), find_device("h100"))
        setup = Evaluator(traffic(), big, GOAL.slo).setup(ClusterLayout(1, 2, 1, 8, 2048))
        assert setup.prefill is not None
        assert setup.decode.kv_tokens == pytest.approx(4 * setup.prefill.kv_tokens, rel=0.01)


class TestSimulationPool:
    def jobs(self) -> list[Job]:
        return [Job(ClusterLayout(0, 1, count, 1, 2048), 60) for count in (1, 2, 3)]

    def evaluator(self) -> Evaluator:
        return Evaluator(busiest(traffic(), 100), hardware(), GOAL.slo)

    def test_two_processes_find_what_one_does(self) -> None:
        results = []
        for processes in (1, 2):
            with SimulationPool(self.evaluator(), processes, Journal(None, self.evaluator())) as pool:
                results.append(pool.run(self.jobs(), lambda found: None))
        assert results[0] == results[1]

    def test_an_interrupted_search_goes_on_where_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "state.jsonl"
        with SimulationPool(self.evaluator(), 1, Journal(path, self.evaluator())) as pool:
            first = pool.run(self.jobs()[:2], lambda found: None)
        with path.open("a") as file:
            file.write('{"about": "cut sho')
        journal = Journal(path, self.evaluator())
        assert [journal.find(job) for job in self.jobs()] == [*first, None]

    def test_results_of_other_traffic_are_not_taken(self, tmp_path: Path) -> None:
        path = tmp_path / "state.jsonl"
        with SimulationPool(self.evaluator(), 1, Journal(path, self.evaluator())) as pool:
            pool.run(self.jobs()[:1], lambda found: None)
        other = Evaluator(busiest(traffic(13.0), 100), hardware(), GOAL.slo)
        assert Journal(path, other).find(self.jobs()[0]) is None

    def test_an_evaluation_survives_json(self) -> None:
        found = self.evaluator().evaluate(self.jobs()[0])
        assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found


class TestWhatIsWritten:
    def test_the_values_file_is_one_that_chart_and_spec_accept(self) -> None:
        values = yaml.safe_load(helm_values(plan(), hardware(), "/models/llama"))
        schema = json.loads((ROOT / "helm" / "tandem" / "values.schema.json").read_text())
        schema["required"] = []  # the rest has defaults in values.yaml
        jsonschema.validate(values, schema)
        spec = ClusterSpec.model_validate(values["cluster"])
        chosen = plan().chosen
        assert chosen is not None
        assert spec.models[0].decode.workers == chosen.layout.decode_workers
        assert values["node"]["gpus"] == chosen.layout.devices

    @pytest.mark.parametrize(("device", "weights"), [("h100", "fp8"), ("a100", "int8")])  # an A100 has no fp8
    def test_weights_of_one_byte_are_served_as_the_device_can(self, device: str, weights: str) -> None:
        one_byte = Hardware(find_model("llama-3-8b", element_bytes=1.0), find_device(device))
        engine = yaml.safe_load(helm_values(plan(), one_byte, "/models/llama"))["cluster"]["models"][0]["engine"]
        assert (engine["weights"], engine["kv_dtype"]) == (weights, "fp8")

    def test_without_a_plan_there_are_no_values(self) -> None:
        goal = Goal(Slo(ttft_s=0.01), max_devices=2)
        nothing = make_plan(traffic(), hardware(), goal, SearchOptions(effort=EFFORT))
        with pytest.raises(InputError, match="expected a plan to deploy"):
            helm_values(nothing, hardware(), "m")

    def test_the_report_needs_no_network_and_names_what_it_shows(self) -> None:
        page = html_report(plan(), "roofline <of> h100").replace(get_plotlyjs(), "")
        assert not re.search(r'(?:src|href)\s*=\s*["\']?(?:https?:)?//', page)
        assert "roofline &lt;of&gt; h100" in page
        for chart in ("goodput-cost", "ttft-tpot", "variants"):
            assert f"Plotly.newPlot('{chart}'" in page

    def test_json_has_no_numbers_that_json_lacks(self) -> None:
        json.dumps(plan().to_json(), allow_nan=False)
