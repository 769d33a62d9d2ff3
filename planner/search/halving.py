"""Successive halving (Jamieson, Talwalkar: AISTATS 2016): many layouts on little traffic, the better on more.

Layouts compete within their number of devices, so that every price keeps its best to the end: the best disaggregated
and the best aggregated layout stay as long as the price does, to compare them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.search.evaluate import Evaluation, Job
from planner.search.layout import ClusterLayout

RUNGS = (1 / 12, 1 / 4, 1.0)
LEAST_REQUESTS = 150
KEEP = 1 / 2
DEARER = 1.25  # than the cheapest of its kind that meets the goal: such layouts have nothing left to show
HOPELESS = 2.0  # times the misses that the objective allows: a short stretch says that much for sure

Run = Callable[[Sequence[Job]], list[Evaluation]]


@dataclass(frozen=True, slots=True)
class Effort:
    """`per_price`: how many layouts of each number of devices are simulated at all."""

    requests: int = 1000
    per_price: int = 6
    finalists: int = 2


def select(ranked: Sequence[tuple[float, ClusterLayout]], per_price: int) -> list[ClusterLayout]:
    """The most promising of each number of devices, the best of each kind among them."""
    chosen: dict[int, list[ClusterLayout]] = defaultdict(list)
    for _, layout in ranked:
        mine = chosen[layout.devices]
        is_first_of_kind = all(each.is_aggregated is not layout.is_aggregated for each in mine)
        if len(mine) < per_price or is_first_of_kind:
            mine.append(layout)
    return [layout for mine in chosen.values() for layout in mine]


def halve(layouts: Sequence[ClusterLayout], effort: Effort, attainment: float, run: Run) -> list[Evaluation]:
    """Evaluations of the last round, on `effort.requests` requests."""
    left = list(layouts)
    found: list[Evaluation] = []
    dear: list[Evaluation] = []
    for share in RUNGS:
        requests = min(effort.requests, max(LEAST_REQUESTS, round(effort.requests * share)))
        is_last = share == RUNGS[-1]
        most_misses = None if is_last else min(1.0, HOPELESS * (1 - attainment) + 0.1)
        found = run([Job(layout, requests, most_misses=most_misses) for layout in left])
        if not is_last:
            worth, dearer = _by_worth(found, attainment)
            left = _survivors(worth, effort)
            dear += dearer
    for is_aggregated in (False, True):
        kind = [each for each in dear if each.layout.is_aggregated is is_aggregated]
        if not any(_meets(each, attainment) for each in found if each.layout.is_aggregated is is_aggregated):
            found += _second_look(kind, effort, attainment, run)
    return found


def _by_worth(found: Sequence[Evaluation], attainment: float) -> tuple[list[Evaluation], list[Evaluation]]:
    """Those that a plan may come to, and those that are dearer than what seems to do."""
    worth: list[Evaluation] = []
    dear: list[Evaluation] = []
    for is_aggregated in (False, True):
        kind = [each for each in found if each.layout.is_aggregated is is_aggregated]
        cheapest = min((each.layout.devices for each in kind if _meets(each, attainment)), default=None)
        for each in kind:
            is_dear = cheapest is not None and each.layout.devices > DEARER * cheapest
            (dear if is_dear else worth).append(each)
    return worth, dear


def _survivors(found: Sequence[Evaluation], effort: Effort) -> list[ClusterLayout]:
    kept: list[ClusterLayout] = []
    for mine in _by_price(found).values():
        count = max(effort.finalists, round(len(mine) * KEEP))
        best = [next((each for each in mine if each.layout.is_aggregated is kind), None) for kind in (False, True)]
        kept += [each.layout for each in mine if each in mine[:count] or each in best]
    return kept


def _second_look(dear: Sequence[Evaluation], effort: Effort, attainment: float, run: Run) -> list[Evaluation]:
    """What a little traffic said would do does not do with all of it: so up to the first price that does."""
    found: list[Evaluation] = []
    for _, mine in sorted(_by_price(dear).items()):
        found += run([Job(each.layout, effort.requests) for each in mine[: effort.finalists]])
        if any(_meets(each, attainment) for each in found):
            break
    return found


def _by_price(found: Sequence[Evaluation]) -> dict[int, list[Evaluation]]:
    """The best of each number of devices first."""
    prices: dict[int, list[Evaluation]] = defaultdict(list)
    for each in sorted(found, key=rank, reverse=True):
        prices[each.layout.devices].append(each)
    return prices


def _meets(found: Evaluation, attainment: float) -> bool:
    return found.complete and found.joint >= attainment


def rank(found: Evaluation) -> tuple[bool, float, float, float]:
    """More is better: attainment, then how far below the objectives the latencies are."""
    return found.complete, round(found.joint, 3), -(found.ttft_p90_s or 0.0), -(found.tpot_p90_s or 0.0)
