"""Successive halving (Jamieson, Talwalkar: AISTATS 2016): many layouts on little traffic, the better ones on more.

Layouts compete with those of the same number of devices, so every price keeps its best layouts to the end. The best
disaggregated and the best aggregated layout of a price both stay, to compare them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.search.evaluate import Evaluation, Job
from planner.search.layout import ClusterLayout

RUNGS = (1 / 12, 1 / 4, 1.0)
MIN_REQUESTS = 150
KEEP = 1 / 2
MAX_PRICE_RATIO = (
    1.25  # layouts dearer than this multiple of the cheapest of their kind that meets the goal are set aside
)
GIVE_UP_MISS_RATIO = (
    2.0  # multiple of the allowed misses at which an early round gives up: certain even on little traffic
)

Run = Callable[[Sequence[Job]], list[Evaluation]]


@dataclass(frozen=True, slots=True)
class Effort:
    """`requests`: of the last round. `per_price`: layouts to simulate for each number of devices; `finalists` of them
    reach the last round."""

    requests: int = 1000
    per_price: int = 6
    finalists: int = 2


def select(ranked: Sequence[tuple[float, ClusterLayout]], per_price: int) -> list[ClusterLayout]:
    """The most promising layouts of each number of devices, including the best of each kind."""
    chosen: dict[int, list[ClusterLayout]] = defaultdict(list)
    for _, layout in ranked:
        mine = chosen[layout.devices]
        is_first_of_kind = all(each.is_aggregated is not layout.is_aggregated for each in mine)
        if len(mine) < per_price or is_first_of_kind:
            mine.append(layout)
    return [layout for mine in chosen.values() for layout in mine]


def halve(layouts: Sequence[ClusterLayout], effort: Effort, attainment: float, run: Run) -> list[Evaluation]:
    """Returns the evaluations of the last round, on `effort.requests` requests."""
    left = list(layouts)
    found: list[Evaluation] = []
    dear: list[Evaluation] = []
    for share in RUNGS:
        requests = min(effort.requests, max(MIN_REQUESTS, round(effort.requests * share)))
        is_last = share == RUNGS[-1]
        most_misses = None if is_last else min(1.0, GIVE_UP_MISS_RATIO * (1 - attainment) + 0.1)
        found = run([Job(layout, requests, most_misses=most_misses) for layout in left])
        if not is_last:
            worth, dearer = _split_by_price(found, attainment)
            left = _survivors(worth, effort)
            dear += dearer
    for is_aggregated in (False, True):
        kind = [each for each in dear if each.layout.is_aggregated is is_aggregated]
        if not any(_meets(each, attainment) for each in found if each.layout.is_aggregated is is_aggregated):
            found += _retry_dearer(kind, effort, attainment, run)
    return found


def _split_by_price(found: Sequence[Evaluation], attainment: float) -> tuple[list[Evaluation], list[Evaluation]]:
    """Splits into layouts to keep, and layouts much dearer than the cheapest that meets the goal so far."""
    worth: list[Evaluation] = []
    dear: list[Evaluation] = []
    for is_aggregated in (False, True):
        kind = [each for each in found if each.layout.is_aggregated is is_aggregated]
        cheapest = min((each.layout.devices for each in kind if _meets(each, attainment)), default=None)
        for each in kind:
            is_dear = cheapest is not None and each.layout.devices > MAX_PRICE_RATIO * cheapest
            (dear if is_dear else worth).append(each)
    return worth, dear


def _survivors(found: Sequence[Evaluation], effort: Effort) -> list[ClusterLayout]:
    kept: list[ClusterLayout] = []
    for mine in _by_price(found).values():
        count = max(effort.finalists, round(len(mine) * KEEP))
        best = [next((each for each in mine if each.layout.is_aggregated is kind), None) for kind in (False, True)]
        kept += [each.layout for each in mine if each in mine[:count] or each in best]
    return kept


def _retry_dearer(dear: Sequence[Evaluation], effort: Effort, attainment: float, run: Run) -> list[Evaluation]:
    """The cheaper layouts failed with all of the traffic: tries the dearer ones up to the first price that meets it."""
    found: list[Evaluation] = []
    for _, mine in sorted(_by_price(dear).items()):
        found += run([Job(each.layout, effort.requests) for each in mine[: effort.finalists]])
        if any(_meets(each, attainment) for each in found):
            break
    return found


def _by_price(found: Sequence[Evaluation]) -> dict[int, list[Evaluation]]:
    """Evaluations by number of devices, each list best first."""
    prices: dict[int, list[Evaluation]] = defaultdict(list)
    for each in sorted(found, key=rank, reverse=True):
        prices[each.layout.devices].append(each)
    return prices


def _meets(found: Evaluation, attainment: float) -> bool:
    return found.complete and found.joint >= attainment


def rank(found: Evaluation) -> tuple[bool, float, float, float]:
    """Sort key, higher is better: attainment, then lower latencies."""
    return found.complete, round(found.joint, 3), -(found.ttft_p90_s or 0.0), -(found.tpot_p90_s or 0.0)
