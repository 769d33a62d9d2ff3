"""The search for a plan, given traffic, hardware and a goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from planner.hardware import Hardware, RoleHardware
from planner.search.analytic import Analysis
from planner.search.costs import Cost, better_at_the_price, costs_of
from planner.search.evaluate import Evaluation, Evaluator, Job
from planner.search.goal import Goal
from planner.search.headroom import Headroom
from planner.search.layout import ClusterLayout, layouts
from planner.search.machines import Deployed, MachineKinds
from planner.search.race import Race, Run, rank
from planner.search.schedule import Schedule
from planner.search.simulation_pool import Journal, SimulationPool
from planner.search.traffic import busiest, with_note_if_short, with_note_of_missing_classes
from planner.search.trials import Resampled, SearchProgress, Trials, Variant
from planner.search.verdict import Miss, explain_miss, verdict
from planner.traces.context import within_context
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.errors import ConfigError, InputError
from tandem.text.words import plural


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`requests`: to simulate, of the busiest part. `state`: file for results, from which an interrupted search
    resumes; None: no file."""

    requests: int = 1000
    processes: int = 1
    state: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen` None: no layout meets the goal, and `miss` has the reason. `finalists`: simulated to their end, best
    first. `resampled`: the chosen layout, and before it the best of the next cheaper price; without one,
    those that meet the goal with the recorded traffic, but with too few others. `same_price`: a finalist that meets the
    goal better and costs the same on whole machines. `load`: the factor on the rate of the given traffic. `headroom`,
    `schedule`, `grid`: only if they were asked for; the grid has layouts around the chosen one."""

    goal: Goal
    model: str
    machines: MachineKinds
    traffic: tuple[str, ...]
    load: float
    requests_per_s: float
    considered: int
    possible: int
    simulated: int
    chosen: Evaluation | None
    costs: tuple[Cost, ...]  # of the chosen layout
    miss: Miss | None
    finalists: tuple[Evaluation, ...]
    variants: tuple[Variant, ...]
    resampled: tuple[Resampled, ...]
    verdict: str
    same_price: Evaluation | None
    headroom: Headroom | None = None
    schedule: Schedule | None = None
    grid: tuple[Evaluation, ...] = ()

    def meets(self, found: Evaluation) -> bool:
        return found.meets(self.goal.attainment)

    def frontier(self) -> list[Evaluation]:
        """The best layout of each price, without those that a cheaper one matches in goodput."""
        best: list[Evaluation] = []
        for each in sorted(self.finalists, key=lambda found: (self.price(found.layout), -found.goodput_per_s)):
            if not best or each.goodput_per_s > best[-1].goodput_per_s:
                best.append(each)
        return best

    @property
    def device(self) -> str:
        return self.machines.device

    def price(self, layout: ClusterLayout) -> float:
        """What layouts are ordered by."""
        return self.machines.price(layout)

    def per_hour(self, layout: ClusterLayout) -> float:
        """Dollars."""
        return self.machines.per_hour(layout)

    def deployed(self, layout: ClusterLayout) -> Deployed:
        return self.machines.deployed(layout)

    def same_price_note(self) -> str | None:
        found, chosen = self.same_price, self.chosen
        if found is None or chosen is None:
            return None
        return (
            f"{plural(found.layout.devices, 'device')} cost the same on whole machines: {found.layout} meets the goal "
            f"with {found.joint:.1%} of the requests, the plan with {chosen.joint:.1%}"
        )

    def headroom_lines(self) -> list[str]:
        found = self.headroom
        return [] if found is None else list(found.lines(self.costs, found.load / self.load))

    def to_json(self) -> dict[str, Any]:
        """With what each layout that was simulated to its end has `deployed`."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= self.machines.to_json() if name == "machines" else {name: value}
        shown = ((self.chosen, found["chosen"]), (self.same_price, found["same_price"]))
        for each, fields in (*shown, *zip(self.finalists, found["finalists"], strict=True)):
            if each is not None:
                fields["deployed"] = self.deployed(each.layout).to_json()
        if self.schedule is not None:
            for part, fields in zip(self.schedule.parts, found["schedule"]["parts"], strict=True):
                fields["deployed"] = self.deployed(part.layout).to_json()
        return found


def make_plan(
    trace: TrafficTrace,
    hardware: RoleHardware,
    goal: Goal,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
) -> Plan:
    """Raises ConfigError when the model does not fit on the devices, InputError when the trace has no rate."""
    with PlanSearch(trace, hardware, goal, options, progress) as search:
        return search.plan()


def with_grid(
    plan: Plan,
    trace: TrafficTrace,
    hardware: RoleHardware,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
) -> Plan:
    """`plan` with the layouts around the chosen one, for a picture."""
    with PlanSearch(trace, hardware, plan.goal, options, progress) as search:
        return search.with_grid(plan)


class PlanSearch:
    """A context manager that owns the simulations of one traffic on one hardware."""

    def __init__(
        self,
        trace: TrafficTrace,
        hardware: RoleHardware,
        goal: Goal,
        options: SearchOptions,
        progress: SearchProgress,
        among: Callable[[ClusterLayout], bool] = lambda layout: True,
    ) -> None:
        """`among`: the layouts to look at. Raises ConfigError when the model does not fit on the devices, InputError
        when the trace has no rate."""
        goal.slo.check_classes(trace)
        trace = within_context(trace, hardware.model.context_tokens)
        self._whole, self._trace = trace, _simulated_part(trace, options.requests)
        self._hardware, self._goal, self._at_once = hardware, goal, options.processes
        self._machines = MachineKinds.of(hardware, are_whole=goal.whole_machines)
        self._everything = list(filter(among, _layouts(hardware, goal)))
        evaluator = Evaluator(
            self._trace, hardware, goal.slo, goal.max_running_requests, longest_step_s=goal.longest_step_s
        )
        self._pool = SimulationPool(evaluator, options.processes, Journal(options.state, evaluator))
        self._trials = Trials(self._pool, goal, self._machines.price, progress)

    def __enter__(self) -> PlanSearch:
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    @property
    def span_s(self) -> float:
        """Of the part that is simulated."""
        return self._trace.span_s

    def is_met_at(self, load: float) -> bool:
        """Whether a layout meets the goal at `load` times the rate."""
        analysis = self._analysis(load)
        return self._race(analysis, load, self._probe(load)).is_met(analysis.possible(self._everything))

    def is_met_by(self, layout: ClusterLayout, load: float) -> bool:
        """Whether this layout does."""
        race = self._race(self._analysis(load), load, self._probe(load))
        return race.best(race.judge(str(layout), [layout])) is not None

    def cheapest(self, plan: ClusterLayout) -> tuple[Evaluation, bool]:
        """The cheapest layout that meets the goal, and True; else the cheapest with which as many requests meet their
        objectives as with `plan`, and False."""
        analysis = self._analysis(1.0)
        race = self._race(analysis, 1.0, self._trials.run)
        if (best := race.best(race.finalists(analysis.possible(self._everything)))) is not None:
            return best, True
        (whole,) = self._trials.run("the plan", [Job(plan, len(self._trace))])
        by_price = sorted(self._everything, key=lambda layout: (self._machines.price(layout), layout))
        tried = (self._trials.run("smaller ones", [Job(each, len(self._trace))])[0] for each in by_price)
        return next((each for each in tried if each.joint >= whole.joint), whole), False

    def plan(self, load: float = 1.0) -> Plan:
        """For `load` times the rate."""
        goal, hardware, trials = self._goal, self._hardware, self._trials
        trace, analysis = self._shown_trace(load), self._analysis(load)
        possible = analysis.possible(self._everything)
        race = self._race(analysis, load, trials.run)
        finalists = sorted(race.finalists(possible), key=rank, reverse=True)
        chosen = race.best(finalists)
        if chosen is None:
            variants, resampled = [], [trials.resampled(each) for each in finalists if race.meets(each)]
            miss = explain_miss(resampled, finalists, self._everything, analysis, goal)
        else:
            variants = trials.variants(chosen, _cost_error(hardware, chosen.layout))
            resampled, miss = trials.around(chosen, finalists), None
        together, apart = ([each for each in finalists if each.layout.is_aggregated is kind] for kind in (True, False))
        return Plan(
            goal=goal,
            model=hardware.model.name,
            machines=self._machines,
            traffic=(trace.name, *trace.notes),
            load=load,
            requests_per_s=trace.requests_per_s,
            considered=len(self._everything),
            possible=len(possible),
            simulated=trials.simulated,
            chosen=chosen,
            costs=() if chosen is None else costs_of(chosen, trace, self._whole.at_rate(load), self._machines),
            miss=miss,
            finalists=tuple(finalists),
            variants=tuple(variants),
            resampled=tuple(resampled),
            verdict=verdict(race.best(apart), race.best(together), goal, self._machines),
            same_price=None if chosen is None else self._better_at_the_price(chosen, finalists),
        )

    def with_grid(self, plan: Plan) -> Plan:
        """With the layouts around the chosen one."""
        if plan.chosen is None:
            return plan
        least_prefill = 1 if self._hardware.is_mixed else 0
        return replace(plan, grid=tuple(self._trials.grid(plan.chosen, plan.finalists, least_prefill)))

    def _better_at_the_price(self, chosen: Evaluation, finalists: Sequence[Evaluation]) -> Evaluation | None:
        met = [each for each in finalists if each.meets(self._goal.attainment)]
        better = better_at_the_price(chosen, met, self._machines)
        return next(filter(self._trials.is_sure, better), None)

    def _shown_trace(self, load: float) -> TrafficTrace:
        """More load makes the simulated part shorter."""
        slo = self._goal.slo
        part = with_note_of_missing_classes(self._trace.at_rate(load), self._whole, slo)
        return part if slo.tpot_s is None else with_note_if_short(part, len(self._whole), slo.tpot_s)

    def _analysis(self, load: float) -> Analysis:
        goal = self._goal
        trace = self._trace.at_rate(load)
        return Analysis(trace, self._hardware, goal.slo.loosest(), goal.attainment, goal.max_running_requests)

    def _race(self, analysis: Analysis, load: float, run: Run) -> Race:
        return Race(
            len(self._trace), self._goal.attainment, self._goal.max_devices, self._machines.price, analysis.fastest(),
            run, self._trials.is_sure, self._at_once, load,
        )  # fmt: skip

    def _probe(self, load: float) -> Run:
        """Shows as one task what is simulated at `load`."""
        return lambda what, jobs: self._trials.run(f"load x {load:g}", jobs)


def _simulated_part(trace: TrafficTrace, requests: int) -> TrafficTrace:
    part = busiest(trace, requests)
    if not part.span_s:
        more = "" if len(part) == len(trace) else ": raise --simulated"
        raise InputError(
            f"{trace.name}: expected requests at two times or more, because a plan needs their rate, got "
            f"{plural(len(part), 'request')} at one time{more}",
            field="trace",
        )
    return part


def _layouts(hardware: RoleHardware, goal: Goal) -> list[ClusterLayout]:
    """All that fit. Raises ConfigError if there is none."""
    most = goal.max_devices
    decode = _widths(hardware.of(Role.DECODE), most)
    prefill = _widths(hardware.of(Role.PREFILL), most) if hardware.is_mixed else None
    if prefill is not None and (least := prefill[0] + decode[0]) > most:
        raise ConfigError(
            f"--devices: expected at least {least} for a prefill and a decode worker of {hardware.model.name} on "
            f"{hardware.name}, got {most}",
            field="--devices",
        )
    return list(layouts(decode, most, goal.step_tokens, prefill))


def _widths(hardware: Hardware, max_devices: int) -> list[int]:
    """The narrowest first."""
    widths = [tp for tp in hardware.widths() if tp <= max_devices]
    if not widths:
        raise ConfigError(
            f"--devices: expected enough for {hardware.model.resident_bytes / 1e9:.0f} GB of weights: "
            f"{hardware.model.name} does not fit on {max_devices} x {hardware.device.name}",
            field="--devices",
        )
    return widths


def _cost_error(hardware: RoleHardware, layout: ClusterLayout) -> float | None:
    """The largest of the workers' mean relative errors of step times. None: one is not known."""
    errors = [hardware.of(role).cost_error(tp) for role, tp in layout.widths]
    return None if None in errors else max(error for error in errors if error is not None)
