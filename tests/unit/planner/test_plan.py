"""The search: what it finds is what trying everything finds, and what it says of it can be deployed and opened."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from plotly.offline import get_plotlyjs

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import ElementSizes, find_model
from planner.pages.report import html_report
from planner.search.analytic import Analysis, Limit
from planner.search.costs import better_at_the_price, costs_of
from planner.search.evaluate import Evaluation, Evaluator, Job
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKind, MachineKinds
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.simulation_pool import Journal, SimulationPool, code_digest, fingerprint
from planner.search.traffic import busiest
from planner.search.trials import RESAMPLES
from planner.search.values import helm_values
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError

ROOT = Path(__file__).resolve().parents[3]
GOAL = Goal(Slo(ttft_s=0.4, tpot_s=0.02), attainment=0.9, max_devices=3, step_tokens=(2048,), max_running_requests=128)
OPTIONS = SearchOptions(requests=100)


@cache
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@cache
def traffic(rate: float = 17.0) -> TrafficTrace:
    return synthetic_trace(200, Gamma(rate), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)


@cache
def plan() -> Plan:
    return make_plan(traffic(), hardware(), GOAL, OPTIONS)


class TestBoundedSteps:
    BUSY = replace(GOAL, bounds_steps=True, max_devices=4)

    def test_prompts_beside_answers_take_no_device_of_their_own(self) -> None:
        busy = traffic(26.0)
        free, bounded = (
            make_plan(busy, hardware(), replace(self.BUSY, bounds_steps=each), OPTIONS) for each in (False, True)
        )
        assert free.chosen is not None
        assert bounded.chosen is not None
        assert bounded.chosen.layout.devices < free.chosen.layout.devices

    def test_the_values_and_the_report_have_the_longest_step(self) -> None:
        found = replace(plan(), goal=self.BUSY)
        engine = yaml.safe_load(helm_values(found, hardware(), "/models/m"))["cluster"]["models"][0]["engine"]
        assert engine["longest_step_s"] == 0.02
        assert "steps with prompts and answers of up to 0.02 s" in html_report(found, "")
        assert "longest_step_s" not in helm_values(plan(), hardware(), "/models/m")

    def test_results_of_other_code_are_not_taken_from_a_journal(self, tmp_path: Path) -> None:
        def digest(root: str, name: str = "router/policies/b.py", text: str = "b = 1") -> str:
            for path, content in {"planner/a.py": "a = 1", "router/policies/b.py": "b = 1", name: text}.items():
                (tmp_path / root / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / root / path).write_text(content)
            return code_digest(tmp_path / root)

        assert digest("first") == digest("again") == digest("notes", "tandem/notes.txt", "no source")
        assert digest("first") != digest("changed", text="b = 2")
        assert digest("first") != digest("more", "tandem/c.py", "c = 1")
        assert digest("first") != digest("widths", "kvtransfer/session/reshard.py", "d = 1")

    def test_results_of_other_steps_are_not_taken_from_a_journal(self) -> None:
        free = Evaluator(traffic(), hardware(), GOAL.slo)
        assert fingerprint(free) != fingerprint(replace(free, longest_step_s=0.02))

    def test_without_a_tpot_objective_nothing_says_how_long_a_step_may_take(self) -> None:
        with pytest.raises(ConfigError, match=r"--bounded-steps: expected --tpot with it, .* got none"):
            Goal(Slo(ttft_s=1.0), bounds_steps=True)
        with pytest.raises(ConfigError, match=r"at most 60 s: .* got 100"):
            Goal(Slo(tpot_s=100.0), bounds_steps=True)


class TestPools:
    """Each role has the KV memory that its own width leaves: weights of 141 GB leave 1.5 GB in each of two H100s, and
    37 GB in each of four."""

    LAYOUT = ClusterLayout(4, 2, 2, 4, 2048)

    def big(self) -> Hardware:
        return Hardware(find_model("llama-3-70b"), find_device("h100"))

    def test_narrow_prefill_workers_leave_decode_workers_their_memory(self) -> None:
        big = self.big()
        setup = Evaluator(traffic(), big, GOAL.slo).setup(self.LAYOUT)
        assert setup.prefill is not None
        assert (setup.prefill.kv_tokens, setup.decode.kv_tokens) == (big.kv_tokens(2), big.kv_tokens(4))
        assert setup.decode.kv_tokens > 20 * setup.prefill.kv_tokens

    @pytest.mark.parametrize("prefill_tp", [2, 4])
    def test_the_values_give_each_role_what_was_simulated(self, prefill_tp: int) -> None:
        big, chosen = self.big(), plan().chosen
        assert chosen is not None
        layout = replace(self.LAYOUT, prefill_tp=prefill_tp)
        deployed = replace(plan(), chosen=replace(chosen, job=replace(chosen.job, layout=layout)))
        values = yaml.safe_load(helm_values(deployed, big, "/models/llama"))
        model = ClusterSpec.model_validate(values["cluster"]).models[0]
        found = [model.engine_of(role).kv_memory_bytes for role in (Role.PREFILL, Role.DECODE)]
        assert found == [int(big.kv_rank_bytes(prefill_tp)), int(big.kv_rank_bytes(4))]
        assert model.can_change_roles == (prefill_tp == 4)


class TestSearch:
    def test_it_meets_the_goal_and_says_what_it_costs(self) -> None:
        found = plan()
        assert found.chosen is not None
        assert found.chosen.joint >= GOAL.attainment
        part, whole, deployed = found.costs
        devices = found.chosen.layout.devices
        assert (part.what, part.devices, part.per_hour) == ("the busiest part", devices, devices * 3.0)
        assert part.per_million_tokens == pytest.approx(part.per_hour / (found.chosen.tokens_per_s * 3600) * 1e6)
        trace = traffic()
        millions = (trace.prompt_tokens.sum() + trace.output_tokens.sum()) / 1e6
        assert whole.per_million_tokens == pytest.approx(whole.per_hour * trace.span_s / 3600 / millions)
        assert whole.per_million_tokens is not None
        assert whole.per_million_tokens > (part.per_million_tokens or 0.0), "quiet times are paid too"
        assert deployed.devices >= whole.devices

    def test_whole_machines_cost_more_than_the_layout(self) -> None:
        chosen = plan().chosen
        assert chosen is not None
        wide = replace(chosen, job=replace(chosen.job, layout=ClusterLayout(2, 4, 1, 4, 2048), requests=200))
        whole, deployed = costs_of(wide, traffic(), traffic(), MachineKinds.of(hardware()))
        assert (whole.devices, deployed.devices) == (12, 16)
        assert deployed.per_million_output_tokens == pytest.approx(16 / 12 * (whole.per_million_output_tokens or 0.0))

    def test_of_layouts_on_the_same_machines_those_that_do_better_are_found(self) -> None:
        chosen = plan().chosen
        assert chosen is not None

        def found(layout: ClusterLayout, joint: float) -> Evaluation:
            return replace(chosen, joint=joint, job=replace(chosen.job, layout=layout))

        ten, twelve = found(ClusterLayout(3, 2, 1, 4, 2048), 0.96), ClusterLayout(0, 1, 3, 4, 2048)
        others = [
            found(twelve, 0.981),
            found(ClusterLayout(0, 1, 5, 4, 2048), 1.0),  # three machines
            found(ClusterLayout(0, 1, 2, 4, 2048), 1.0),  # one
            found(ClusterLayout(2, 4, 2, 4, 2048), 0.9601),  # shown as 96.0 % too
        ]
        small, large = (MachineKinds(kind, kind) for kind in (MachineKind("h100", 3.0, each) for each in (8, 16)))
        assert better_at_the_price(ten, others, small) == others[:1]
        assert better_at_the_price(ten, others, large) == [], "one machine has the layout's devices only"
        beside = replace(plan(), chosen=ten, finalists=(others[0], ten), same_price=others[0])
        note = (
            "12 devices cost the same on whole machines: aggregated 3xTP4 @2048 meets the goal with 98.1% of the "
            "requests, the plan with 96.0%"
        )
        assert beside.same_price_note() == note
        assert f"<p>{note}.</p>" in html_report(replace(beside, resampled=()), "roofline")
        assert plan().same_price_note() is None

    def test_one_that_was_simulated_is_named_beside_the_plan(self) -> None:
        """Machines of two devices: the plan takes three of four."""
        device = find_device("h100").model_copy(update={"devices_per_node": 2})
        narrow = Hardware(find_model("llama-3-8b"), device)
        found = make_plan(traffic(88.0), narrow, replace(GOAL, max_devices=4), OPTIONS)
        assert found.chosen is not None
        assert found.same_price is not None
        assert (found.chosen.layout.devices, found.same_price.layout.devices) == (3, 4)
        assert found.same_price.joint == max(each.joint for each in found.finalists) > found.chosen.joint
        assert found.deployed(found.chosen.layout) == found.deployed(found.same_price.layout)
        assert found.to_json()["same_price"]["deployed"]["devices"] == 4

    def test_asked_for_whole_machines_it_plans_with_all_of_their_devices(self) -> None:
        device = find_device("h100").model_copy(update={"devices_per_node": 2})
        narrow = Hardware(find_model("llama-3-8b"), device)
        by_devices = make_plan(traffic(88.0), narrow, replace(GOAL, max_devices=4), OPTIONS)
        found = make_plan(traffic(88.0), narrow, replace(GOAL, max_devices=4, whole_machines=True), OPTIONS)
        assert by_devices.chosen is not None
        assert found.chosen is not None
        assert (by_devices.chosen.layout.devices, found.chosen.layout.devices) == (3, 4)
        assert found.chosen.joint > by_devices.chosen.joint
        assert found.same_price is None
        assert found.price(by_devices.chosen.layout) == found.price(found.chosen.layout) == 4
        assert found.per_hour(by_devices.chosen.layout) == found.costs[-1].per_hour == 4 * device.price_per_hour
        assert by_devices.per_hour(by_devices.chosen.layout) == 3 * device.price_per_hour
        assert "3 device" not in found.verdict

    def test_each_layout_has_its_price_on_whole_machines(self) -> None:
        chosen = plan().chosen
        assert chosen is not None
        wide = replace(chosen, job=replace(chosen.job, layout=ClusterLayout(2, 4, 1, 4, 2048)))
        found = replace(plan(), chosen=wide, finalists=(wide, chosen), resampled=())
        deployed = {"machines": 2, "devices": 16, "per_hour": 48.0}
        assert found.to_json()["finalists"][0]["deployed"] == found.to_json()["chosen"]["deployed"] == deployed
        assert found.to_json()["finalists"][1]["deployed"]["machines"] == 1
        assert "<td>12</td><td>36.00</td><td>16, $48.00</td>" in html_report(found, "roofline")

    def test_it_is_tried_under_other_load_lengths_and_with_a_worker_lost(self) -> None:
        found = {each.name: each.evaluation for each in plan().variants}
        assert {"load -25 %", "load +25 %", "prompts +25 %", "answers +25 %"} <= found.keys()
        less, more = found["load -25 %"], found["load +25 %"]
        assert less is not None
        assert more is not None
        assert less.joint >= more.joint

    def test_the_verdict_says_whether_disaggregation_pays(self) -> None:
        assert re.search("disaggregation (pays|does not pay|makes no clear difference)", plan().verdict)

    def test_steps_may_take_as_much_longer_as_the_cost_model_errs(self) -> None:
        found = {each.name: each.evaluation for each in plan().variants}
        chosen, slower = plan().chosen, found["steps 6 % slower"]
        assert chosen is not None
        assert slower is not None
        assert (slower.tpot_p50_s or 0.0) > 1.04 * (chosen.tpot_p50_s or 0.0)
        assert slower.joint <= chosen.joint

    def test_it_is_tried_with_resampled_traces(self) -> None:
        found = make_plan(traffic(26.0), hardware(), GOAL, OPTIONS)
        assert found.chosen is not None
        cheaper, chosen = found.resampled
        assert chosen.layout == found.chosen.layout
        assert cheaper.layout.devices < chosen.layout.devices
        assert 0 <= cheaper.met <= chosen.met <= RESAMPLES
        assert 0.0 < chosen.low < chosen.high <= 1.0
        assert cheaper.high < found.chosen.joint

    def test_a_plan_to_be_sure_of_costs_more(self) -> None:
        found = plan()
        assert found.chosen is not None
        *_, as_recorded = found.resampled
        assert as_recorded.met < RESAMPLES, "or it would be sure already"
        sure = make_plan(traffic(), hardware(), replace(GOAL, confidence=1.0, max_devices=6), OPTIONS)
        assert sure.chosen is not None
        *_, chosen = sure.resampled
        assert chosen.layout == sure.chosen.layout
        assert chosen.met == RESAMPLES
        assert sure.chosen.layout.devices > found.chosen.layout.devices
        assert as_recorded.layout in [each.layout for each in sure.finalists], "it met the goal, and is in the table"

    def test_a_confidence_that_nothing_has_says_what_comes_nearest(self) -> None:
        found = make_plan(traffic(), hardware(), replace(GOAL, confidence=1.0, max_devices=1), OPTIONS)
        assert found.chosen is None
        assert found.miss is not None
        assert found.miss.limit == "confidence"
        surest = max(found.resampled, key=lambda each: each.met)
        said = f"does with {surest.met} of 20 resampled traces, and --confidence 1 asks for 20"
        assert said in found.miss.explanation
        assert surest.met < RESAMPLES
        html_report(found, "roofline")

    def test_the_loss_of_the_only_worker_is_no_service(self) -> None:
        """An aggregated one has no role."""
        small = make_plan(traffic(3.0), hardware(), GOAL, OPTIONS)
        assert small.chosen is not None
        assert small.chosen.layout.decode_workers == 1
        lost = {each.name: each for each in small.variants}["one worker lost"]
        assert "one worker lost" in html_report(small, "roofline")
        assert (lost.evaluation, lost.meets) == (None, False)

    def test_more_money_buys_more_along_the_frontier(self) -> None:
        frontier = plan().frontier()
        assert [each.layout.devices for each in frontier] == sorted({each.layout.devices for each in frontier})
        assert [each.goodput_per_s for each in frontier] == sorted(each.goodput_per_s for each in frontier)


class TestUnsatisfiable:
    def test_an_objective_beyond_the_hardware_names_the_limit_and_the_excess(self) -> None:
        goal = Goal(Slo(ttft_s=0.01, tpot_s=0.02), max_devices=4, step_tokens=(2048,))
        found = make_plan(traffic(), hardware(), goal, OPTIONS)
        assert found.chosen is None
        assert found.miss is not None
        assert found.miss.limit == Limit.PREFILL_TIME
        assert found.miss.excess is not None
        assert found.miss.excess > 2

    def test_an_objective_missed_in_queues_names_what_the_closest_layout_does(self) -> None:
        goal = Goal(Slo(ttft_s=0.12), 0.99, 2, (2048,))
        found = make_plan(traffic(20.0), hardware(), goal, OPTIONS)
        assert found.chosen is None
        assert found.miss is not None
        assert found.miss.limit in ("ttft", *Limit)
        assert "x" in found.miss.explanation

    def test_a_model_that_does_not_fit_says_so(self) -> None:
        goal = Goal(GOAL.slo, max_devices=1)
        with pytest.raises(ConfigError, match="does not fit on 1 x h100"):
            make_plan(traffic(), Hardware(find_model("llama-3-70b"), find_device("h100")), goal, SearchOptions())

    @pytest.mark.parametrize(
        "build",
        [
            lambda: Goal(Slo()),
            lambda: Goal(GOAL.slo, 1.0),
            lambda: Goal(GOAL.slo, 0.9, 0),
            lambda: Goal(GOAL.slo, confidence=1.1),
        ],
    )
    def test_a_goal_that_is_none_is_refused(self, build: object) -> None:
        assert callable(build)
        with pytest.raises(ConfigError):
            build()


class TestBounds:
    def analysis(self) -> Analysis:
        return Analysis(traffic(), hardware(), GOAL.slo, 0.9, 128)

    def test_too_much_traffic_is_named_by_its_limit(self) -> None:
        slow = Analysis(traffic(200.0), hardware(), GOAL.slo, 0.9, 128)
        assert slow.bounds(ClusterLayout(1, 1, 1, 1, 2048)).worst[0] is Limit.PREFILL_LOAD


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
        one_byte = Hardware(find_model("llama-3-8b", ElementSizes(1.0, 1.0)), find_device(device))
        engine = yaml.safe_load(helm_values(plan(), one_byte, "/models/llama"))["cluster"]["models"][0]["engine"]
        assert (engine["weights"], engine["kv_dtype"]) == (weights, "fp8")

    def test_weights_and_kv_may_have_formats_of_their_own(self) -> None:
        mixed = Hardware(find_model("llama-3-8b", ElementSizes(weights=1.0)), find_device("h100"))
        engine = yaml.safe_load(helm_values(plan(), mixed, "/models/llama"))["cluster"]["models"][0]["engine"]
        assert engine["weights"] == "fp8"
        assert "kv_dtype" not in engine

    @pytest.mark.parametrize(
        ("elements", "said"),
        [
            (ElementSizes(weights=0.5), r"--element-bytes: expected weights of 2 or 1 bytes .* h100, got 0\.5"),
            (ElementSizes(weights=4.0), r"--element-bytes: expected weights of 2 or 1 bytes .* h100, got 4"),
            (ElementSizes(kv=0.5), r"--kv-bytes: expected KV of 2 or 1 bytes .* got 0\.5"),
        ],
    )
    def test_a_format_that_no_engine_serves_is_refused(self, elements: ElementSizes, said: str) -> None:
        narrow = Hardware(find_model("llama-3-8b", elements), find_device("h100"))
        with pytest.raises(InputError, match=said):
            helm_values(plan(), narrow, "/models/llama")

    def test_a_trace_without_a_rate_is_refused(self) -> None:
        with pytest.raises(InputError, match="two times or more, because a plan needs their rate, got 1 request at"):
            make_plan(traffic().head(1), hardware(), GOAL, OPTIONS)

    def test_without_a_plan_there_are_no_values(self) -> None:
        goal = Goal(Slo(ttft_s=0.01), max_devices=2)
        nothing = make_plan(traffic(), hardware(), goal, OPTIONS)
        with pytest.raises(InputError, match="expected a plan to deploy"):
            helm_values(nothing, hardware(), "m")

    def test_the_report_is_one_file_that_needs_no_network(self) -> None:
        page = html_report(plan(), "roofline <of> h100")
        assert len(page) < 3_000_000
        packed = re.search("<script type='text/plain' id='plotly'>([A-Za-z0-9+/=]+)</script>", page)
        assert packed is not None
        assert gzip.decompress(base64.b64decode(packed[1])).decode() == get_plotlyjs()
        assert not re.search(r'(?:src|href)\s*=\s*["\']?(?:https?:)?//', page.replace(packed[0], ""))

    def test_the_report_names_what_it_shows(self) -> None:
        page = html_report(plan(), "roofline <of> h100")
        assert "roofline &lt;of&gt; h100" in page
        for chart in ("goodput-cost", "ttft-tpot", "variants"):
            assert f"<div class='chart' id='{chart}'>" in page
        found = re.search("id='variants-figure'>(.*?)</script>", page)
        assert found is not None
        bars = json.loads(found[1].replace("<\\/", "</"))["data"][0]
        chosen = plan().resampled[-1]
        share = bars["y"][bars["x"].index("the plan")]
        at = bars["x"].index("the plan")
        assert share - bars["error_y"]["arrayminus"][at] == pytest.approx(100 * chosen.low, abs=1e-6)
        assert "the whole trace, as deployed" in page

    def test_json_has_no_numbers_that_json_lacks(self) -> None:
        json.dumps(plan().to_json(), allow_nan=False)
