"""Plans whose prefill workers have one model of device and whose decode workers have another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.planning.candidates import load_candidates
from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags, load_role_hardware
from cluster.cli.commands.planning.simulate import ClusterFlags, SimulateFlags, run_simulate
from planner.devices import LinkSpec, find_device
from planner.hardware import Hardware, MixedHardware, RoleHardware, setup_of_spec
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.capacity import plan_largest_load
from planner.search.choices import plan_on_each
from planner.search.evaluate import Evaluator, Job
from planner.search.goal import Goal
from planner.search.headroom import Headroom
from planner.search.layout import ClusterLayout
from planner.search.machines import Deployed, MachineKind, MachineKinds, Machines
from planner.search.plan import Plan, SearchOptions, make_plan, with_grid
from planner.search.roofline import rooflines_of
from planner.search.simulation_pool import Journal, fingerprint
from planner.search.trials import SearchProgress
from planner.search.values import describe_machines
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tests.unit.planner.test_race import judged

GOAL = Goal(Slo(0.5, 0.008), 0.9, max_devices=4, step_tokens=(2048,))
OPTIONS = SearchOptions(requests=60)
LAYOUT = ClusterLayout(3, 4, 3, 2, 2048)


@cache
def alone(device: str) -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device(device))


@cache
def mixed(prefill: str = "h100", decode: str = "h200") -> MixedHardware:
    return MixedHardware.pair(alone(prefill), alone(decode))


@cache
def traffic() -> TrafficTrace:
    """Prompts of 3,000 tokens, whose prefill wants arithmetic; a TPOT of 8 ms, which wants memory bandwidth."""
    return synthetic_trace(100, Gamma(12.0), LengthSpec(3000, 0.6, 12_000), LengthSpec(150, 0.5, 600), seed=2)


@cache
def plan_alone() -> Plan:
    return make_plan(traffic(), alone("h200"), GOAL, OPTIONS)


@cache
def plan(prefill: str = "h100", decode: str = "h200") -> Plan:
    return make_plan(traffic(), mixed(prefill, decode), GOAL, OPTIONS)


class TestHardware:
    def test_a_handoff_takes_the_slower_link_both_ways(self) -> None:
        slow = alone("a100").cost(2).transfer_s(1 << 30)
        assert slow > 1.9 * alone("h100").cost(2).transfer_s(1 << 30)
        for pair in (mixed("a100", "h100"), mixed("h100", "a100")):
            assert [pair.of(role).cost(2).transfer_s(1 << 30) for role in Role] == [slow, slow]

    def test_the_slower_link_has_the_lower_rate_and_the_longer_latency(self) -> None:
        wide, early = LinkSpec(bytes_per_s=50e9, latency_s=2e-3, efficiency=0.2), LinkSpec(bytes_per_s=20e9)
        assert wide.slower(early) == early.slower(wide) == wide, "a fifth of 50 is less than 20"
        late = LinkSpec(bytes_per_s=60e9, latency_s=5e-3)
        assert wide.slower(late) == wide.model_copy(update={"latency_s": 5e-3})

    def test_each_role_has_its_own_steps_and_memory(self) -> None:
        setup = Evaluator(traffic(), mixed("h100", "b200"), GOAL.slo).setup(LAYOUT)
        assert setup.prefill is not None
        for pool, device, tp in ((setup.prefill, "h100", 4), (setup.decode, "b200", 2)):
            own = alone(device)
            assert pool.kv_tokens == own.kv_tokens(tp)
            assert pool.cost.prefill_s(4096, 0) == own.cost(tp).prefill_s(4096, 0), "all-reduces over its own fabric"
            assert pool.cost.decode_step_s(32, 65_536) == own.cost(tp).decode_step_s(32, 65_536)

    def test_slower_steps_are_those_of_both_roles(self) -> None:
        evaluator = Evaluator(traffic(), mixed(), GOAL.slo)
        usual, slower = (evaluator.setup(LAYOUT, steps=factor) for factor in (1.0, 1.5))
        assert usual.prefill is not None
        assert slower.prefill is not None
        for before, after in ((usual.prefill.cost, slower.prefill.cost), (usual.decode.cost, slower.decode.cost)):
            assert after.prefill_s(4096, 0) == pytest.approx(1.5 * before.prefill_s(4096, 0))
            assert after.transfer_s(1 << 30) == before.transfer_s(1 << 30)

    def test_a_simulated_handoff_waits_for_the_slower_link(self) -> None:
        device = find_device("h200")
        narrow = device.model_copy(update={"link": device.link.model_copy(update={"bytes_per_s": 5e9})})
        pair = MixedHardware.pair(alone("h100"), replace(alone("h200"), device=narrow))
        job = Job(ClusterLayout(2, 1, 1, 1, 2048), 60)
        fast, slow = (Evaluator(traffic(), each, GOAL.slo).evaluate(job) for each in (mixed(), pair))
        assert (slow.tpot_p90_s or 0.0) > 2 * (fast.tpot_p90_s or 0.0)

    def test_widths_are_those_that_fit_each_device(self) -> None:
        """141 GB of weights: two H200s hold them, H100s only as four with room for KV beside 2,048 tokens."""
        big = find_model("llama-3-70b")
        small = find_device("h100").model_copy(update={"memory_share": 0.8})
        pair = MixedHardware.pair(Hardware(big, small), Hardware(big, find_device("h200")))
        goal = replace(GOAL, slo=Slo(60.0, 1.0), max_devices=6)
        found = make_plan(traffic(), pair, goal, OPTIONS)
        assert found.chosen is not None
        assert (found.considered, found.chosen.layout) == (1, ClusterLayout(1, 4, 1, 2, 2048))
        with pytest.raises(ConfigError, match=r"--devices: expected at least 6 for .* on h100:h200, got 5"):
            make_plan(traffic(), pair, replace(goal, max_devices=5), OPTIONS)


class TestSearch:
    def test_a_mixed_plan_is_cheaper_than_one_on_either_device(self) -> None:
        candidates: list[RoleHardware] = [alone("h100"), alone("h200"), mixed(), mixed("h200", "h100")]
        choices = plan_on_each(traffic(), candidates, GOAL, OPTIONS)
        assert [each.to_json()["device"] for each in choices] == ["h100:h200", "h200", "h100", "h200:h100"]
        prices = [2 * 3.0 + 1 * 3.8, 3 * 3.8, 4 * 3.0, 1 * 3.8 + 3 * 3.0]
        assert [each.per_hour for each in choices] == pytest.approx(prices)
        best = choices[0].plan
        assert best is not None
        assert best.chosen is not None
        assert best.chosen.layout == ClusterLayout(2, 1, 1, 1, 2048)
        assert not any(each.layout.is_aggregated for each in best.finalists)
        assert [each.devices for each in best.costs] == [3, 3, 16]
        assert [each.per_hour for each in best.costs] == pytest.approx([9.8, 9.8, 8 * 3.0 + 8 * 3.8])

    def test_a_pair_of_equal_devices_is_planned_as_that_device(self) -> None:
        single, pair = plan_alone(), plan("h200", "h200")
        assert pair.chosen == single.chosen
        assert pair.chosen is not None
        assert not pair.chosen.layout.is_aggregated
        assert pair.finalists == tuple(each for each in single.finalists if not each.layout.is_aggregated)
        assert pair.variants == single.variants
        assert pair.resampled == single.resampled
        assert pair.costs == single.costs

    def test_one_device_is_searched_in_the_order_of_devices(self) -> None:
        """What the search of one device found before there were pairs."""
        found = plan_alone()
        assert found.simulated == 66
        assert [str(each.layout) for each in found.finalists] == [
            "2xTP1 : 1xTP1 @2048",
            "1xTP2 : 1xTP1 @2048",
            "aggregated 3xTP1 @2048",
            "1xTP1 : 1xTP1 @2048",
            "aggregated 1xTP2 @2048",
            "aggregated 1xTP1 @2048",
        ]

    def test_resampled_traces_and_lost_workers_are_simulated(self) -> None:
        found = plan()
        assert found.chosen is not None
        cheaper, chosen = found.resampled
        assert chosen.layout == found.chosen.layout
        assert found.per_hour(cheaper.layout) < found.per_hour(chosen.layout)
        by_name = {each.name: each.evaluation for each in found.variants}
        assert "steps 8 % slower" in by_name, "the larger error of both devices"
        assert by_name["one decode worker lost"] is None
        lost = by_name["one prefill worker lost"]
        assert lost is not None
        assert lost.layout == replace(found.chosen.layout, prefill_workers=1)

    def test_the_last_prefill_worker_leaves_the_decode_device(self) -> None:
        left = Job(ClusterLayout(0, 1, 2, 1, 2048), 60)
        found, expected = (Evaluator(traffic(), each, GOAL.slo).evaluate(left) for each in (mixed(), alone("h200")))
        assert found == expected

    def test_the_grid_has_a_worker_of_each_role(self) -> None:
        found = with_grid(plan(), traffic(), mixed(), OPTIONS)
        assert {(each.layout.prefill_workers, each.layout.decode_workers) for each in found.grid} == {
            (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1),
        }  # fmt: skip

    def test_without_a_plan_the_closest_layouts_are_told(self) -> None:
        hard = make_plan(traffic(), mixed(), replace(GOAL, slo=Slo(0.06, 0.0055), max_devices=3), OPTIONS)
        assert hard.chosen is None
        assert hard.miss is not None
        assert hard.verdict == "no layout meets the objectives"

    def test_the_largest_load_is_that_of_both_devices(self) -> None:
        goal = replace(GOAL, max_devices=2)
        found = plan_largest_load(traffic(), mixed(), goal, OPTIONS, growth=0.1)
        assert found.headroom is not None
        assert found.headroom.of == "up to 2 x h100:h200"
        for load, is_met in ((found.headroom.load, True), (found.headroom.missed_at, False)):
            assert load is not None
            at_load = make_plan(traffic().at_rate(load), mixed(), goal, OPTIONS)
            assert (at_load.chosen is not None) is is_met

    def test_of_largest_loads_the_largest_is_the_plan(self) -> None:
        loads = {"h100": 1.5, "h200": 2.5, "h100:h200": 2.5}
        prices = {"h100": 1.0, "h200": 3.0, "h100:h200": 2.0}

        def made(
            trace: TrafficTrace, hardware: RoleHardware, goal: Goal, options: SearchOptions, progress: SearchProgress
        ) -> Plan:
            kind = MachineKind(hardware.name, prices[hardware.name], 8)
            headroom = Headroom("", loads[hardware.name], None, 0.0, None, None)
            return replace(plan(), machines=MachineKinds(kind, kind), headroom=headroom)

        candidates: list[RoleHardware] = [alone("h100"), alone("h200"), mixed()]
        choices = plan_on_each(traffic(), candidates, GOAL, OPTIONS, make=made)
        assert [each.to_json()["device"] for each in choices] == ["h100:h200", "h200", "h100"]
        assert [each.to_json()["load"] for each in choices] == [2.5, 2.5, 1.5]

    def test_results_of_other_hardware_are_not_taken_from_a_journal(self, tmp_path: Path) -> None:
        other = alone("h200").device.model_copy(update={"mbu": 0.5})
        pairs = [
            mixed(),
            mixed("h200", "h100"),
            MixedHardware.pair(replace(alone("h200"), device=other), alone("h200")),
        ]
        hardware: list[RoleHardware] = [alone("h100"), alone("h200"), *pairs]
        evaluators = [Evaluator(traffic(), each, GOAL.slo) for each in hardware]
        assert len({fingerprint(each) for each in evaluators}) == len(evaluators)
        path, job = tmp_path / "state.jsonl", Job(ClusterLayout(1, 1, 1, 1, 2048), 60)
        for number, each in enumerate(evaluators):
            Journal(path, each).add(judged(job, number / 10))
        assert [(Journal(path, each).find(job) or judged(job, 1.0)).joint for each in evaluators] == [
            0.0, 0.1, 0.2, 0.3, 0.4,
        ]  # fmt: skip


class TestMachines:
    KINDS = MachineKinds(MachineKind("h100", 3.0, 8), MachineKind("h200", 3.8, 4))

    def test_machines_of_each_kind_have_their_own_size_and_price(self) -> None:
        """Twelve H100s and six H200s."""
        assert self.KINDS.per_hour(LAYOUT) == self.KINDS.price(LAYOUT) == pytest.approx(12 * 3.0 + 6 * 3.8)
        assert self.KINDS.machines(LAYOUT) == (Machines(2, 8), Machines(2, 4))
        found = self.KINDS.deployed(LAYOUT)
        assert (found.machines, found.devices) == (4, 24)
        assert found.per_hour == self.KINDS.deployed_price(LAYOUT) == pytest.approx(16 * 3.0 + 8 * 3.8)
        assert found.to_json()["of_role"] == {
            "prefill": {"machines": 2, "devices": 16},
            "decode": {"machines": 2, "devices": 8},
        }

    def test_machines_of_two_kinds_are_whole(self) -> None:
        """They are two, even if one of each is enough."""
        assert self.KINDS.machines(ClusterLayout(3, 1, 1, 2, 2048)) == (Machines(1, 8), Machines(1, 4))
        found = self.KINDS.deployed(ClusterLayout(8, 1, 1, 1, 2048))
        assert (found.machines, found.devices) == (2, 12)
        assert found.per_hour == pytest.approx(8 * 3.0 + 4 * 3.8)

    @pytest.mark.parametrize("price", [0.0, 3.0])
    def test_of_one_kind_the_price_is_the_number_of_devices(self, price: float) -> None:
        kind = MachineKind("h100", price, 8)
        one = MachineKinds(kind, kind)
        assert (one.price(LAYOUT), one.per_hour(LAYOUT)) == (18, 18 * price)
        assert one.deployed(LAYOUT) == Deployed(3, 24, 24 * price)
        assert one.to_json() == {"device": "h100", "price_per_hour": price, "devices_per_node": 8}

    def test_what_is_deployed_is_said_by_kind(self) -> None:
        chosen = plan().chosen
        assert chosen is not None
        wide = replace(plan(), machines=self.KINDS, chosen=replace(chosen, job=replace(chosen.job, layout=LAYOUT)))
        assert describe_machines(wide) == (
            "deployed on 2 machines of 8 h100 and 2 machines of 4 h200: 24 devices, $78.40 per hour, "
            "6 of them without a worker"
        )

    def test_sums_in_another_order_are_one_price(self) -> None:
        kinds = MachineKinds(MachineKind("a", 0.1, 8), MachineKind("b", 0.7, 8))
        assert 1 * 0.1 + 1 * 0.7 != 8 * 0.1, "in floating point"
        assert kinds.price(ClusterLayout(1, 1, 1, 1, 2048)) == kinds.price(ClusterLayout(8, 1, 0, 1, 2048))


class TestWhatIsWritten:
    def test_json_has_the_device_of_each_role(self) -> None:
        found = json.loads(json.dumps(plan().to_json(), allow_nan=False))
        assert found["device"] == "h100:h200"
        assert {role: each["price_per_hour"] for role, each in found["of_role"].items()} == {
            "prefill": 3.0,
            "decode": 3.8,
        }
        assert "price_per_hour" not in found
        assert found["chosen"]["deployed"]["of_role"]["decode"] == {"machines": 1, "devices": 8}

    def test_the_report_has_prices_and_a_roofline_of_each_device(self) -> None:
        charts = rooflines_of(plan(), mixed(), traffic())
        assert [{point.phase for point in each.points} for each in charts] == [{"prefill"}, {"decode"}]
        assert [each.memory_bytes_per_s for each in charts] == [3.35e12, 4.8e12]
        page = html_report(plan(), "roofline", (), charts)
        assert "What a device does in a step: decode on h200" in page
        assert "<div class='chart' id='roofline-decode'>" in page
        assert "up to 4 x h100:h200, $3.00 per h100 and $3.80 per h200 and hour" in page
        found = re.search("id='goodput-cost-figure'>(.*?)</script>", page)
        assert found is not None
        frontier = json.loads(found[1].replace("<\\/", "</"))["data"][0]
        assert frontier["x"] == pytest.approx([6.8, 9.8])

    def test_the_frontier_is_ordered_by_price(self) -> None:
        prices = [plan().per_hour(each.layout) for each in plan().frontier()]
        assert prices == sorted(set(prices))


def spec(**model: Any) -> ClusterSpec:
    engine = {"device": "cuda", "dtype": "bfloat16"}
    found = {"source": "llama-3-8b", **model, "engine": engine | model.get("engine", {})}
    return ClusterSpec.model_validate({"models": [found], "control": {"backend": "subprocess"}})


class TestSimulate:
    def test_a_spec_is_simulated_with_the_device_of_each_role(self) -> None:
        found = setup_of_spec(
            spec(decode={"engine": {"kv_memory_bytes": 1 << 30}}, prefill={"tp": 2, "engine": {"weights": "int8"}}),
            mixed("a100", "h100"),
            mean_prompt_tokens=1000.0,
            trace_block=None,
        )
        assert found.prefill is not None
        assert found.decode.kv_tokens == (1 << 30) // 131_072
        assert found.decode.cost.prefill_s(4096, 0) == alone("h100").cost(1).prefill_s(4096, 0)
        assert found.prefill.cost.prefill_s(4096, 0) < 0.7 * alone("a100").cost(2).prefill_s(4096, 0), "in int8"
        assert not found.can_change_roles
        assert found.devices == 3

    def test_a_share_of_a_device_is_refused(self) -> None:
        half = spec(engine={"device_share": 0.5})
        with pytest.raises(ConfigError, match=r"engine\.device_share: expected 1, because roles on different devices"):
            setup_of_spec(half, mixed(), mean_prompt_tokens=1000.0, trace_block=None)

    def test_options_of_a_role_replace_the_device(self) -> None:
        flags = HardwareFlags("llama-3-8b", "h200")
        assert load_role_hardware(flags, {Role.PREFILL: "h100"}) == mixed()
        assert load_role_hardware(flags, {Role.PREFILL: "h100", Role.DECODE: "b200"}) == mixed("h100", "b200")
        assert load_role_hardware(flags, {Role.PREFILL: "H200"}) == load_role_hardware(flags, {}) == alone("h200")

    def test_errors_name_the_option_of_the_role(self) -> None:
        flags = HardwareFlags("llama-3-8b", "h200")
        with pytest.raises(ConfigError, match=r"--prefill-device: expected a100, .*got 'tpu'"):
            load_role_hardware(flags, {Role.PREFILL: "tpu"})
        with pytest.raises(ConfigError, match=r"got 4 of cpu, 2 of h200: .*--device is that of a role whose option"):
            load_role_hardware(flags, {Role.PREFILL: "cpu"})

    def test_a_device_of_workers_that_are_not_there_is_refused(self) -> None:
        flags = SimulateFlags(
            TrafficFlags("synthetic"),
            HardwareFlags("llama-3-8b", "h200"),
            ClusterFlags(prefill=0, devices={Role.PREFILL: "h100"}),
            Slo(),
        )
        with pytest.raises(ConfigError, match="--prefill-device: expected none, because the cluster has no prefill"):
            run_simulate(flags)


class TestRefusals:
    @pytest.mark.parametrize(
        ("device", "cost", "said"),
        [
            ("h100", None, r"--mix-roles: expected two devices or more with it, .* got --device h100"),
            ("h100,H100", None, r"--mix-roles: expected devices of different names, got h100 twice"),
            (
                "h100,h200",
                "mine.json",
                r"--mix-roles: expected no --cost with it, because mine\.json was measured on one",
            ),
            ("h100,cpu", None, r"element_bytes: expected the same .* got 2 of h100, 4 of cpu"),
        ],
    )
    def test_pairs_that_are_none_are_refused(self, device: str, cost: str | None, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            load_candidates(HardwareFlags("llama-3-8b", device, cost), None, mix_roles=True)

    def test_each_device_alone_and_each_pair_is_planned(self) -> None:
        flags = HardwareFlags("llama-3-8b", "h100,h200,b200")
        names = [each.name for each in load_candidates(flags, "h200=9", mix_roles=True)]
        assert names[:3] == ["h100", "h200", "b200"]
        assert sorted(names[3:]) == sorted(f"{a}:{b}" for a in names[:3] for b in names[:3] if a != b)
        priced = {each.name: MachineKinds.of(each) for each in load_candidates(flags, "h200=9", mix_roles=True)}
        assert priced["h200:b200"].prefill.price_per_hour == priced["b200:h200"].decode.price_per_hour == 9.0
        assert len(load_candidates(flags, None)) == 3

    def test_a_device_without_a_price_is_refused(self) -> None:
        free = replace(alone("h200"), device=find_device("h200").model_copy(update={"price_per_hour": 0.0}))
        pair = MixedHardware.pair(alone("h100"), free)
        with pytest.raises(ConfigError, match=r"h200: price_per_hour: expected a price .* in its file or with --price"):
            plan_on_each(traffic(), [alone("h100"), pair], GOAL, OPTIONS)

    def test_a_measured_cost_model_has_a_role_of_its_own_device_only(self) -> None:
        with pytest.raises(ConfigError, match=r"--decode-device: expected none with --cost, because mine\.json was"):
            load_role_hardware(HardwareFlags("llama-3-8b", "h100", "mine.json"), {Role.DECODE: "h200"})
