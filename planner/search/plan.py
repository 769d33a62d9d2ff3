"""The search for a plan, given traffic, hardware and objectives; and the plan's costs, variants and verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.hardware import Hardware
from planner.search.analytic import MEANING, Analysis, Bounds
from planner.search.evaluate import Evaluation, Evaluator, Job, without_worker
from planner.search.halving import Effort, halve, rank, select
from planner.search.layout import ClusterLayout, layouts
from planner.search.simulation_pool import Journal, SimulationPool
from planner.search.traffic import TrafficShape, busiest
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError
from tandem.text.words import plural

SearchProgress = Callable[[str, int, int], None]  # description, jobs done, jobs in all


@dataclass(frozen=True, slots=True)
class Goal:
    """`attainment`: the share of requests that must meet both objectives."""

    slo: Slo
    attainment: float = 0.95
    max_devices: int = 16
    step_tokens: tuple[int, ...] = (2048, 8192)
    max_running_requests: int = 256

    def __post_init__(self) -> None:
        if self.slo.ttft_s is None and self.slo.tpot_s is None:
            raise ConfigError(
                "--ttft: expected an objective, got neither --ttft nor --tpot: give one or both", field="--ttft"
            )
        if not 0 < self.attainment < 1:
            raise ConfigError(
                f"--attainment: expected a share above 0 and below 1, got {self.attainment:g}", field="--attainment"
            )
        if self.max_devices < 1:
            raise ConfigError(f"--devices: expected at least 1, got {self.max_devices}", field="--devices")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`state`: file for results, from which an interrupted search resumes; None: no file."""

    processes: int = 1
    state: Path | None = None
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars. Million tokens: prompt and answer together; output: answers alone. Busy: counts only the time in which
    workers ran steps."""

    per_hour: float
    per_million_tokens: float | None
    per_million_tokens_busy: float | None
    per_million_output_tokens: float | None

    @classmethod
    def of(cls, found: Evaluation, price_per_hour: float) -> Costs:
        per_hour = found.layout.devices * price_per_hour

        def per_million(tokens_per_s: float, share: float = 1.0) -> float | None:
            return per_hour * share / (tokens_per_s * 3600) * 1e6 if tokens_per_s > 0 else None

        return cls(
            per_hour,
            per_million(found.tokens_per_s),
            per_million(found.tokens_per_s, found.busy),
            per_million(found.output_tokens_per_s),
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """The plan under changed conditions. `evaluation` None: no service without that worker."""

    name: str
    evaluation: Evaluation | None
    meets: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """Why no layout meets the objectives: the limit that binds for the closest layout, and by how much."""

    closest: Evaluation | None
    limit: str
    excess: float | None  # 1.5: 50 % above the limit; None: no request finished
    explanation: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen` None: no layout meets the goal, and `miss` has the reason. `finalists`: last round, best first."""

    goal: Goal
    model: str
    device: str
    price_per_hour: float
    traffic: tuple[str, ...]
    requests_per_s: float
    considered: int
    possible: int
    simulated: int
    chosen: Evaluation | None
    costs: Costs | None
    miss: Miss | None
    finalists: tuple[Evaluation, ...]
    variants: tuple[Variant, ...]
    verdict: str

    def meets(self, found: Evaluation) -> bool:
        return found.complete and found.joint >= self.goal.attainment

    def frontier(self) -> list[Evaluation]:
        """The best layout of each number of devices, without those that a cheaper one matches in goodput."""
        best: list[Evaluation] = []
        for each in sorted(self.finalists, key=lambda found: (found.layout.devices, -found.goodput_per_s)):
            if not best or each.goodput_per_s > best[-1].goodput_per_s:
                best.append(each)
        return best

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    trace: TrafficTrace,
    hardware: Hardware,
    goal: Goal,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
) -> Plan:
    """Raises ConfigError when the model does not fit on the devices."""
    trace = busiest(trace, options.effort.requests)
    options = replace(options, effort=replace(options.effort, requests=len(trace)))
    widths = [tp for tp in hardware.widths() if tp <= goal.max_devices]
    if not widths:
        raise ConfigError(
            f"--devices: expected enough for {hardware.model.weights_bytes / 1e9:.0f} GB of weights: "
            f"{hardware.model.name} does not fit on {goal.max_devices} x {hardware.device.name}",
            field="--devices",
        )
    analysis = Analysis(TrafficShape.of(trace), hardware, goal.slo, goal.attainment, goal.max_running_requests)
    everything = list(layouts(widths, goal.max_devices, goal.step_tokens))
    ranked = analysis.possible(everything)
    evaluator = Evaluator(trace, hardware, goal.slo, goal.max_running_requests)
    with SimulationPool(evaluator, options.processes, Journal(options.state, evaluator)) as pool:
        search = _Search(pool, goal, options.effort, progress)
        finalists = search.finalists(select(ranked, options.effort.per_price))
        chosen = _cheapest(finalists, goal)
        variants = search.variants(chosen) if chosen is not None else []
    price = hardware.device.price_per_hour
    return Plan(
        goal=goal,
        model=hardware.model.name,
        device=hardware.device.name,
        price_per_hour=price,
        traffic=(trace.name, *trace.notes),
        requests_per_s=trace.requests_per_s,
        considered=len(everything),
        possible=len(ranked),
        simulated=search.simulated,
        chosen=chosen,
        costs=None if chosen is None else Costs.of(chosen, price),
        miss=None if chosen is not None else _miss(finalists, everything, analysis, goal),
        finalists=tuple(finalists),
        variants=tuple(variants),
        verdict=_verdict(finalists, goal),
    )


class _Search:
    def __init__(self, pool: SimulationPool, goal: Goal, effort: Effort, progress: SearchProgress) -> None:
        self._pool, self._goal, self._effort, self._progress = pool, goal, effort, progress
        self._round = 0
        self.simulated = 0

    def finalists(self, chosen: Sequence[ClusterLayout]) -> list[Evaluation]:
        if not chosen:
            return []
        found = halve(chosen, self._effort, self._goal.attainment, self._next_round)
        return sorted(found, key=rank, reverse=True)

    def variants(self, chosen: Evaluation) -> list[Variant]:
        base = replace(chosen.job, most_misses=None)
        jobs = {
            "load -25 %": replace(base, load=0.75),
            "load +25 %": replace(base, load=1.25),
            "prompts +25 %": replace(base, prompts=1.25),
            "answers +25 %": replace(base, outputs=1.25),
            "one prefill worker lost": without_worker(base, prefill=True),
            "one decode worker lost": without_worker(base, prefill=False),
        }
        if chosen.layout.is_aggregated:
            del jobs["one prefill worker lost"]
        known = [job for job in jobs.values() if job is not None]
        found = iter(self._run("variants of the plan", known))
        return [self._variant(name, None if job is None else next(found)) for name, job in jobs.items()]

    def _variant(self, name: str, found: Evaluation | None) -> Variant:
        return Variant(name, found, found is not None and found.joint >= self._goal.attainment)

    def _next_round(self, jobs: Sequence[Job]) -> list[Evaluation]:
        self._round += 1
        return self._run(f"round {self._round}: {len(jobs)} layouts, {jobs[0].requests} requests", jobs)

    def _run(self, what: str, jobs: Sequence[Job]) -> list[Evaluation]:
        ended = 0

        def done(_: Evaluation) -> None:
            nonlocal ended
            ended += 1
            self._progress(what, ended, len(jobs))

        self._progress(what, 0, len(jobs))
        self.simulated += len(jobs)
        return self._pool.run(jobs, done)


def _cheapest(finalists: Sequence[Evaluation], goal: Goal) -> Evaluation | None:
    """The best layout among those that meet the goal on the fewest devices."""
    meeting = [each for each in finalists if each.complete and each.joint >= goal.attainment]
    return min(meeting, key=lambda each: (each.layout.devices, *(-value for value in rank(each))), default=None)


def _verdict(finalists: Sequence[Evaluation], goal: Goal) -> str:
    """Whether disaggregation pays for this traffic and hardware."""
    separate = _cheapest([each for each in finalists if not each.layout.is_aggregated], goal)
    together = _cheapest([each for each in finalists if each.layout.is_aggregated], goal)
    if separate is None and together is None:
        return "neither disaggregated nor aggregated layouts meet the objectives"
    if together is None:
        return "disaggregation pays: no aggregated layout of these devices meets the objectives"
    if separate is None:
        return "disaggregation does not pay: only aggregated layouts meet the objectives"
    few, many = separate.layout.devices, together.layout.devices
    if few < many:
        return f"disaggregation pays: {plural(few, 'device')} instead of {many} aggregated"
    if few > many:
        return f"disaggregation does not pay: {plural(many, 'device')} aggregated instead of {few} disaggregated"
    both = f"{_figures('disaggregated', separate)}; {_figures('aggregated', together)}"
    if abs(separate.joint - together.joint) <= _noise(separate.joint, together.joint, separate.job.requests):
        return f"disaggregation makes no clear difference at the same price ({plural(few, 'device')}): {both}"
    if separate.joint > together.joint:
        return f"disaggregation pays at the same price ({plural(few, 'device')}): {both}"
    return f"disaggregation does not pay at the same price ({plural(few, 'device')}): {both}"


def _figures(kind: str, found: Evaluation) -> str:
    latencies = (("TTFT", found.ttft_p90_s), ("TPOT", found.tpot_p90_s))
    p90 = ", ".join(f"{name} p90 {1000 * value:.0f} ms" for name, value in latencies if value is not None)
    return f"{kind} {found.joint:.1%} of requests within their objectives" + (f" ({p90})" if p90 else "")


def _noise(a: float, b: float, requests: int) -> float:
    """The difference of two shares that chance explains: two standard deviations, and at least one request."""
    mean = (a + b) / 2
    return max(2 * math.sqrt(2 * mean * (1 - mean) / requests), 1 / requests)


def _times(excess: float) -> str:
    return f"{excess:.2f} times" if excess < 10 else f"{excess:.0f} times" if excess < 1000 else "over 1,000 times"


def _miss(finalists: Sequence[Evaluation], everything: Sequence[ClusterLayout], analysis: Analysis, goal: Goal) -> Miss:
    if not finalists:
        least: tuple[Bounds, ClusterLayout] = min(
            ((analysis.bounds(each), each) for each in everything), key=lambda found: found[0].worst[1]
        )
        limit, excess = least[0].worst
        return Miss(
            None,
            limit.value,
            excess,
            f"no layout of {plural(goal.max_devices, 'device')} is possible: even in the closest ({least[1]}) "
            f"{MEANING[limit]} takes {_times(excess)} the limit, before any queueing",
        )
    closest = finalists[0]
    slo = goal.slo
    overs = []
    if slo.ttft_s is not None and closest.ttft_p90_s is not None:
        overs.append((1 - (closest.ttft_share or 0.0), "ttft", closest.ttft_p90_s / slo.ttft_s, closest.ttft_p90_s))
    if slo.tpot_s is not None and closest.tpot_p90_s is not None:
        overs.append((1 - (closest.tpot_share or 0.0), "tpot", closest.tpot_p90_s / slo.tpot_s, closest.tpot_p90_s))
    if not overs:
        return Miss(closest, "capacity", None, f"the closest layout ({closest.layout}) finishes no request")
    missing, limit_name, excess, seconds = max(overs)
    return Miss(
        closest,
        limit_name,
        excess,
        f"the closest layout ({closest.layout}) meets the objectives for {closest.joint:.1%} of the requests, "
        f"the goal is {goal.attainment:.1%}; {limit_name.upper()} binds: {missing:.1%} miss it, its p90 is "
        f"{seconds:.3g} s ({excess:.2f} x the objective)",
    )
