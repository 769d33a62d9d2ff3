"""The search finds what listing every layout finds, and simulates far fewer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.analytic import Analysis, allowed_misses
from planner.search.evaluate import Evaluation, Evaluator, Job
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout, layouts
from planner.search.machines import MachineKind, MachineKinds
from planner.search.plan import SearchOptions, make_plan
from planner.search.race import DEARER, Race
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace

STEP_TOKENS = (2048, 8192)
Rule = Callable[[ClusterLayout], bool]


def judged(job: Job, joint: float, *, complete: bool = True) -> Evaluation:
    return Evaluation(
        job=job, joint=joint, ttft_share=joint, tpot_share=joint, goodput_per_s=joint, ttft_p50_s=0.1, ttft_p90_s=0.1,
        ttft_p99_s=0.1, tpot_p50_s=0.01, tpot_p90_s=0.01, tpot_p99_s=0.01, prefill_busy=0.5, decode_busy=0.5,
        hit_rate=0.0, tokens_per_s=1.0, output_tokens_per_s=1.0, rejected=0, complete=complete,
    )  # fmt: skip


class Ruled:
    """A race in which a rule says which layouts meet the goal."""

    def __init__(
        self, rule: Rule, max_devices: int, widths: Sequence[int] = (1, 2, 4, 8), prices: MachineKinds | None = None
    ) -> None:
        """`prices`: of a device for each role."""
        self.rule, self.jobs = rule, list[Job]()
        self.everything = list(layouts(widths, max_devices, STEP_TOKENS, None if prices is None else widths))
        self.price = (lambda layout: layout.devices) if prices is None else prices.price
        self.race = Race(100, 0.9, max_devices, self.price, (widths[-1], widths[-1]), self._run)

    def _run(self, what: str, jobs: Sequence[Job]) -> list[Evaluation]:
        self.jobs += jobs
        ends = [self.rule(job.layout) or job.most_misses is None for job in jobs]
        found = [1.0 if self.rule(job.layout) else job.layout.devices / 1000 for job in jobs]
        return [judged(job, joint, complete=end) for job, joint, end in zip(jobs, found, ends, strict=True)]

    def cheapest(self, *, is_aggregated: bool) -> int | None:
        meeting = (each.devices for each in self.everything if self.rule(each) and each.is_aggregated is is_aggregated)
        return min(meeting, default=None)


def cheapest(found: Sequence[Evaluation], *, is_aggregated: bool) -> int | None:
    meeting = [each.layout for each in found if each.complete and each.joint >= 0.9]
    return min((each.devices for each in meeting if each.is_aggregated is is_aggregated), default=None)


def work_rule(seed: int) -> Rule:
    """Devices lose some of their speed in wide workers; a goal may need a width, or not be met by one kind at all."""
    dice = random.Random(seed)
    prefill, decode = dice.uniform(0.5, 12), dice.uniform(0.5, 12)
    loss, narrowest = dice.uniform(0.7, 1.0), dice.choice((1, 1, 2, 4))
    both = dice.choice((0.8, 1.0, 1.5, 99.0)) * (prefill + decode)
    slow_chunks = dice.choice((0.8, 1.0, 1.2))

    def speed(workers: int, tp: int) -> float:
        return workers * tp * loss ** (tp.bit_length() - 1)

    def meets(layout: ClusterLayout) -> bool:
        chunks = slow_chunks if layout.step_tokens == STEP_TOKENS[0] else 1.0
        if layout.is_aggregated:
            return speed(layout.decode_workers, layout.decode_tp) * chunks >= both
        return (
            layout.prefill_tp >= narrowest
            and speed(layout.prefill_workers, layout.prefill_tp) * chunks >= prefill
            and speed(layout.decode_workers, layout.decode_tp) >= decode
        )

    return meets


def prices(prefill: float, decode: float) -> MachineKinds:
    return MachineKinds(MachineKind("a", prefill, 8), MachineKind("b", decode, 8))


class TestRuled:
    @pytest.mark.parametrize("seed", range(40))
    def test_the_cheapest_of_each_kind_is_that_of_a_list(self, seed: int) -> None:
        ruled = Ruled(work_rule(seed), 24)
        found = ruled.race.finalists(ruled.everything)
        together, apart = (ruled.cheapest(is_aggregated=kind) for kind in (True, False))
        assert cheapest(found, is_aggregated=True) == together
        if together is None or apart is None or apart <= DEARER * together:
            assert cheapest(found, is_aggregated=False) == apart
        else:
            assert cheapest(found, is_aggregated=False) is None, "so dear that no one asks"
        assert len(ruled.jobs) < len(ruled.everything) / 2

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("max_devices", [4, 12])
    def test_the_goal_is_met_if_a_layout_meets_it(self, seed: int, max_devices: int) -> None:
        ruled = Ruled(work_rule(seed), max_devices)
        assert ruled.race.is_met(ruled.everything) == any(map(ruled.rule, ruled.everything))

    def test_every_simulation_is_at_the_load_of_the_race(self) -> None:
        ruled = Ruled(work_rule(1), 12)
        race = replace(ruled.race, load=1.5)
        race.finalists(ruled.everything)
        race.is_met(ruled.everything)
        assert {job.load for job in ruled.jobs} == {1.5}

    def test_handoffs_take_no_time_where_a_pool_is_judged_alone(self) -> None:
        ruled = Ruled(lambda each: each.devices >= 6, 8)
        ruled.race.finalists(ruled.everything)
        separate = [job for job in ruled.jobs if not job.layout.is_aggregated]
        assert {job.free_handoffs for job in separate} == {True, False}
        assert all(job.free_handoffs != (job.layout in ruled.everything) for job in separate)

    def test_all_that_meet_the_goal_at_the_plans_price_are_compared(self) -> None:
        ruled = Ruled(lambda each: each.devices >= 6, 8)
        found = [each.layout for each in ruled.race.finalists(ruled.everything)]
        assert {each for each in ruled.everything if each.devices == 6} <= set(found)

    def test_the_closest_below_the_plan_are_simulated_to_their_end(self) -> None:
        ruled = Ruled(lambda each: each.devices >= 6, 8, widths=(1,))
        found = ruled.race.finalists(ruled.everything)
        below = [each.layout.devices for each in found if each.layout.devices < 6 and not each.layout.is_aggregated]
        assert below == [3, 4, 5]
        assert all(each.complete for each in found)

    @pytest.mark.parametrize("widths", [(1,), (1, 2, 4, 8)])
    def test_if_none_meets_the_goal_the_closest_are_told(self, widths: tuple[int, ...]) -> None:
        ruled = Ruled(lambda each: each.devices > 16, 16, widths)
        found = ruled.race.finalists(ruled.everything)
        assert [(each.layout.devices, each.complete) for each in found] == 3 * [(16, True)]
        nothing = Ruled(lambda each: False, 16, widths)
        found = nothing.race.finalists(nothing.everything)
        assert [(each.layout.devices, each.complete) for each in found] == 3 * [(16, True)]

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("prefill_price", [0.4, 2.9])
    def test_of_two_devices_the_lowest_price_is_that_of_a_list(self, seed: int, prefill_price: float) -> None:
        ruled = Ruled(work_rule(seed), 16, prices=prices(prefill_price, 1.7))
        lowest = min((ruled.price(each) for each in ruled.everything if ruled.rule(each)), default=None)
        found = [ruled.price(each.layout) for each in ruled.race.finalists(ruled.everything) if ruled.race.meets(each)]
        assert min(found, default=None) == lowest
        assert len({*found}) <= 1, "all that meet the goal are at that price"
        assert len(ruled.jobs) < len(ruled.everything) / 2

    def test_two_devices_are_tried_from_the_lowest_price_up(self) -> None:
        """Two prefill workers and one that decodes are fewer devices, but one and five are $10 instead of $11."""

        def enough(each: ClusterLayout) -> bool:
            return each.prefill_workers >= 2 or each.decode_workers >= 5

        ruled = Ruled(enough, 8, widths=(1,), prices=prices(5.0, 1.0))
        best = ruled.race.best(ruled.race.finalists(ruled.everything))
        assert best is not None
        assert replace(best.layout, step_tokens=2048) == ClusterLayout(1, 1, 5, 1, 2048)
        whole = {job.layout for job in ruled.jobs} & {*ruled.everything}
        assert max(map(ruled.price, whole)) == 10.0

    def test_without_layouts_nothing_is_simulated(self) -> None:
        ruled = Ruled(lambda each: True, 4)
        assert ruled.race.finalists([]) == []
        assert ruled.jobs == []


class Case:
    """Traffic and objectives of which every layout is simulated too."""

    def __init__(self, trace: TrafficTrace, slo: Slo, max_devices: int, *, bounds_steps: bool = False) -> None:
        self.trace = trace
        self.goal = Goal(slo, 0.9, max_devices, STEP_TOKENS, bounds_steps=bounds_steps)
        self.hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))

    def listed(self) -> list[Evaluation]:
        goal = self.goal
        evaluator = Evaluator(self.trace, self.hardware, goal.slo, longest_step_s=goal.longest_step_s)
        widths = [tp for tp in self.hardware.widths() if tp <= self.goal.max_devices]
        everything = layouts(widths, self.goal.max_devices, STEP_TOKENS)
        most = allowed_misses(self.goal.attainment, len(self.trace))
        return [evaluator.evaluate(Job(each, len(self.trace), most_misses=most)) for each in everything]


def case(name: str) -> Case:
    """Chat that one device nearly serves, with a longest step too; completion of code; a conversation whose prompts are
    mostly cached."""
    if name == "bounded steps":
        chat = synthetic_trace(100, Gamma(34.0), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)
        return Case(chat, Slo(0.6, 0.02), 3, bounds_steps=True)
    if name == "chat":
        chat = synthetic_trace(100, Gamma(24.0), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)
        return Case(chat, Slo(0.4, 0.02), 3)
    if name == "code":
        code = synthetic_trace(100, Gamma(20.0, 1.5), LengthSpec(1500, 0.8, 7500), LengthSpec(20, 0.8, 200), seed=3)
        return Case(code, Slo(0.25, 0.05), 4)
    shared = SharedPrefixes(5, 1024, 0.8)
    talk = synthetic_trace(
        100, Gamma(12.0, 2.0), LengthSpec(1400, 0.5, 4000), LengthSpec(90, 0.6, 300), prefixes=shared, seed=4
    )
    return Case(talk, Slo(0.2, 0.012), 3)


@pytest.mark.parametrize(
    "name",
    ["chat", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bounded steps", "code", "conversation"))],
)
def test_nothing_cheaper_is_found_by_simulating_every_layout(name: str) -> None:
    tried = case(name)
    goal, listed = tried.goal, tried.listed()
    plan = make_plan(tried.trace, tried.hardware, goal, SearchOptions(len(tried.trace)))
    assert plan.chosen is not None
    assert plan.chosen.layout.devices > 1, "or there would be nothing to find"
    for kind in (True, False):
        assert cheapest(plan.finalists, is_aggregated=kind) == cheapest(listed, is_aggregated=kind)
    analysis = Analysis(tried.trace, tried.hardware, goal.slo, goal.attainment, goal.max_running_requests)
    assert all(analysis.bounds(each.layout).possible for each in listed if plan.meets(each))


def uniform(requests: int, rate: float, prompts: list[int], outputs: list[int]) -> TrafficTrace:
    arrival_s = np.arange(requests) / rate
    turns = -(-requests // len(prompts))
    lengths = [np.array(turns * each, np.int64)[:requests] for each in (prompts, outputs)]
    return TrafficTrace("made up", arrival_s, lengths[0], lengths[1])


@pytest.mark.parametrize(
    ("trace", "slo", "layout", "memory_share"),
    [
        (uniform(300, 500.0, [240], [2]), Slo(0.3, 0.1), ClusterLayout(1, 1, 8, 1, 8192), 0.9),
        (uniform(300, 80.0, [1500, 100], [2, 100]), Slo(1.0, 0.1), ClusterLayout(4, 1, 1, 1, 8192), 0.222),
        (uniform(100, 10.0, [400], [1]), Slo(1.0, 0.004), ClusterLayout(1, 1, 1, 1, 2048), 0.9),
    ],
    ids=["decode workers prefill", "long prompts with short answers", "answers of one token"],
)
def test_bounds_keep_what_meets_the_goal(
    trace: TrafficTrace, slo: Slo, layout: ClusterLayout, memory_share: float
) -> None:
    device = find_device("h100").model_copy(update={"memory_share": memory_share})
    hardware = Hardware(find_model("llama-3-8b"), device)
    assert Evaluator(trace, hardware, slo).evaluate(Job(layout, len(trace))).joint >= 0.95
    assert Analysis(trace, hardware, slo, 0.95, 256).bounds(layout).possible


@pytest.mark.parametrize("seed", [0, 2, 3, 5, 7, 10])  # some layouts are ruled out
def test_what_bounds_rule_out_fails_in_simulation(seed: int) -> None:
    dice = random.Random(seed)
    draw = (
        LengthSpec(dice.uniform(50, 4000), dice.uniform(0, 1.5)),
        LengthSpec(dice.uniform(2, 400), dice.uniform(0, 1)),
    )
    trace = synthetic_trace(80, Gamma(dice.uniform(20, 200), 1.5), *draw, seed=seed)
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    slo = Slo(dice.uniform(0.05, 1.0), dice.uniform(0.008, 0.05))
    analysis = Analysis(trace, hardware, slo, 0.9, 256)
    everything = list(layouts([1, 2], 4, STEP_TOKENS))
    ruled_out = [each for each in everything if not analysis.bounds(each).possible]
    assert ruled_out, "or nothing is tested"
    most = allowed_misses(0.9, len(trace))
    for layout in dice.sample(ruled_out, min(6, len(ruled_out))):
        for longest_step_s in (None, slo.tpot_s):
            evaluator = Evaluator(trace, hardware, slo, longest_step_s=longest_step_s)
            found = evaluator.evaluate(Job(layout, len(trace), most_misses=most))
            assert not found.complete or found.joint < 0.9, (layout, longest_step_s)


def test_a_slow_fabric_rules_no_pool_out() -> None:
    """Wide workers are the slow ones there: beside them every pool would seem to fail."""
    slow = find_device("h100")
    slow = slow.model_copy(update={"fabric": slow.fabric.model_copy(update={"bytes_per_s": 25e9})})
    hardware = Hardware(find_model("llama-3-8b"), slow)
    trace = uniform(60, 8.0, [2048], [20])
    narrow = hardware.cost(1).prefill_s(2048, 0)
    assert hardware.cost(8).prefill_s(2048, 0) > 1.5 * narrow
    goal = Goal(Slo(1.3 * narrow, 0.05), 0.9, 8, (2048,))
    plan = make_plan(trace, hardware, goal, SearchOptions(60))
    assert any(plan.meets(each) and not each.layout.is_aggregated for each in plan.finalists)


def test_handoffs_to_workers_of_another_width_rule_no_pool_out() -> None:
    """Over this link, a prefill worker of four ranks serves four narrow decode workers, but not as many wide ones."""
    device = find_device("h100")
    slow = device.link.model_copy(update={"bytes_per_s": 1.05e9, "efficiency": 1.0})
    device = device.model_copy(update={"link": slow, "devices_per_node": 4})
    hardware, slo = Hardware(find_model("llama-3-8b"), device), Slo(0.3, 0.008)
    trace = synthetic_trace(80, Gamma(10.0, 1.5), LengthSpec(1000, 0.7), LengthSpec(5, 0.5), seed=6)
    assert Analysis(trace, hardware, slo, 0.9, 256).fastest() == (4, 4)
    evaluator = Evaluator(trace, hardware, slo)
    narrow, wide = (Job(ClusterLayout(1, 4, 4, tp, 2048), len(trace)) for tp in (1, 4))
    jobs = (narrow, wide, replace(wide, free_handoffs=True))
    assert [evaluator.evaluate(job).meets(0.9) for job in jobs] == [True, False, True]


@pytest.mark.slow
def test_a_larger_space_gives_no_dearer_plan() -> None:
    tried = case("chat")
    found: list[int] = []
    for max_devices, step_tokens in ((2, (8192,)), (2, STEP_TOKENS), (4, STEP_TOKENS), (6, (512, *STEP_TOKENS))):
        goal = replace(tried.goal, max_devices=max_devices, step_tokens=step_tokens)
        plan = make_plan(tried.trace, tried.hardware, goal, SearchOptions(len(tried.trace)))
        found.append(99 if plan.chosen is None else plan.chosen.layout.devices)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 99


@pytest.mark.parametrize(("attainment", "requests", "most"), [(0.95, 1000, 50), (0.9, 100, 10), (0.95, 19, 0)])
def test_so_many_may_miss(attainment: float, requests: int, most: int) -> None:
    assert allowed_misses(attainment, requests) == most
    assert (requests - most) / requests >= attainment > (requests - most - 1) / requests
