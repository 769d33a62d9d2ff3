"""What a search says of its results: whether disaggregation pays, and why no layout meets the goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.search.analytic import MEANING, Analysis, Bounds
from planner.search.evaluate import Evaluation
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKinds
from planner.search.race import DEARER
from planner.search.trials import RESAMPLES, Resampled
from tandem.text.words import plural


@dataclass(frozen=True, slots=True)
class Miss:
    """Why no layout meets the objectives: the limit that binds for the closest layout, and by how much."""

    closest: Evaluation | None
    limit: str
    excess: float | None  # 1.5: 50 % above the limit; None: no request finished
    explanation: str


def verdict(separate: Evaluation | None, together: Evaluation | None, goal: Goal, machines: MachineKinds) -> str:
    """Whether disaggregation pays for this traffic and hardware. On machines of two kinds no layout is aggregated."""
    is_mixed = machines.is_mixed
    if is_mixed and separate is None:
        return "no layout meets the objectives"
    if is_mixed:
        return "with a device for each role there are no aggregated layouts to compare with"
    if separate is None and together is None:
        return "neither disaggregated nor aggregated layouts meet the objectives"
    if together is None:
        tried = plural(goal.max_devices, "device")
        return f"disaggregation pays: no aggregated layout of up to {tried} meets the objectives"
    if separate is None:
        tried = plural(min(goal.max_devices, int(DEARER * machines.devices(together.layout))), "device")
        return f"disaggregation does not pay: no disaggregated layout of up to {tried} meets the objectives"
    few, many = machines.devices(separate.layout), machines.devices(together.layout)
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


def explain_miss(
    unsure: Sequence[Resampled],
    finalists: Sequence[Evaluation],
    everything: Sequence[ClusterLayout],
    analysis: Analysis,
    goal: Goal,
) -> Miss:
    """`unsure`: layouts that meet the goal with the recorded traffic, but not with enough others. `finalists`: best
    first."""
    return _unsure(unsure, finalists, goal) or (
        _missed(finalists[0], goal) if finalists else _impossible(everything, analysis, goal)
    )


def _unsure(unsure: Sequence[Resampled], finalists: Sequence[Evaluation], goal: Goal) -> Miss | None:
    surest = max(unsure, key=lambda each: each.met, default=None)
    if surest is None:
        return None
    return Miss(
        next(each for each in finalists if each.layout == surest.layout),
        "confidence",
        goal.confidence * RESAMPLES / max(1, surest.met),
        f"with the recorded traffic {plural(len(unsure), 'layout')} would meet the goal, but the surest "
        f"({surest.layout}) does with {surest.met} of {RESAMPLES} resampled traces, and --confidence "
        f"{goal.confidence:g} asks for {math.ceil(goal.confidence * RESAMPLES - 1e-9)}",
    )


def _impossible(everything: Sequence[ClusterLayout], analysis: Analysis, goal: Goal) -> Miss:
    least: tuple[Bounds, ClusterLayout] = min(
        ((analysis.bounds(each), each) for each in everything), key=lambda found: found[0].worst[1]
    )
    limit, excess = least[0].worst
    return Miss(
        None,
        limit.value,
        excess,
        f"no layout of up to {plural(goal.max_devices, 'device')} is possible: even in the closest ({least[1]}) "
        f"{MEANING[limit]} takes {_times(excess)} the limit, before any queueing",
    )


def _missed(closest: Evaluation, goal: Goal) -> Miss:
    if closest.of_class and closest.complete:
        name, worst = min(closest.of_class.items(), key=lambda item: item[1])
        return Miss(
            closest, "class", None,
            f"the closest layout ({closest.layout}) meets the objectives of class {name or 'default'} for {worst:.1%} "
            f"of its requests, the goal is {goal.attainment:.1%}",
        )  # fmt: skip
    slo = goal.slo
    overs = []
    for name, objective_s, share, p90_s, p99_s in (
        ("ttft", slo.ttft_s, closest.ttft_share, closest.ttft_p90_s, closest.ttft_p99_s),
        ("tpot", slo.tpot_s, closest.tpot_share, closest.tpot_p90_s, closest.tpot_p99_s),
    ):
        if objective_s is not None and p90_s is not None and p99_s is not None:
            quantile, seconds = ("p90", p90_s) if p90_s > objective_s else ("p99", p99_s)
            overs.append((1 - (share or 0.0), name, seconds / objective_s, f"its {quantile} is {seconds:.3g} s"))
    if not overs:
        return Miss(closest, "capacity", None, f"the closest layout ({closest.layout}) finishes no request")
    missing, limit_name, excess, figure = max(overs)
    return Miss(
        closest,
        limit_name,
        excess,
        f"the closest layout ({closest.layout}) meets the objectives for {closest.joint:.1%} of the requests, "
        f"the goal is {goal.attainment:.1%}; {limit_name.upper()} binds: {missing:.1%} miss it, {figure} "
        f"({excess:.2f} x the objective)",
    )
