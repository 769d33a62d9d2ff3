"""Successive halving (Jamieson, Talwalkar: AISTATS 2016): many layouts on little traffic, the better on more.

Layouts compete within their number of devices, so that every price keeps its best to the end; the best aggregated
layout of each price stays as long as the price does, to compare with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.search.evaluate import Evaluation, Job
from planner.search.layout import Layout

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


def select(ranked: Sequence[tuple[float, Layout]], per_price: int) -> list[Layout]:
    """The most promising of each number of devices, the best aggregated one among them."""
    chosen: dict[int, list[Layout]] = defaultdict(list)
    for _, layout in ranked:
        mine = chosen[layout.devices]
        is_first_aggregated = layout.is_aggregated and not any(each.is_aggregated for each in mine)
        if len(mine) < per_price or is_first_aggregated:
            mine.append(layout)
    return [layout for mine in chosen.values() for layout in mine]


def halve(layouts: Sequence[Layout], effort: Effort, attainment: float, run: Run) -> list[Evaluation]:
    """Evaluations of the last round, on `effort.requests` requests."""
    left = list(layouts)
    found: list[Evaluation] = []
    for share in RUNGS:
        requests = min(effort.requests, max(LEAST_REQUESTS, round(effort.requests * share)))
        is_last = share == RUNGS[-1]
        most_misses = None if is_last else min(1.0, HOPELESS * (1 - attainment) + 0.1)
        found = run([Job(layout, requests, most_misses=most_misses) for layout in left])
        if not is_last:
            left = _survivors(found, effort, attainment)
    return found


def _survivors(found: Sequence[Evaluation], effort: Effort, attainment: float) -> list[Layout]:
    by_price: dict[int, list[Evaluation]] = defaultdict(list)
    for is_aggregated in (False, True):
        kind = [each for each in found if each.layout.is_aggregated is is_aggregated]
        meeting = [each.layout.devices for each in kind if each.complete and each.joint >= attainment]
        most = DEARER * min(meeting, default=max((each.layout.devices for each in kind), default=0))
        for each in kind:
            if each.layout.devices <= most:
                by_price[each.layout.devices].append(each)
    kept: list[Layout] = []
    for mine in by_price.values():
        mine.sort(key=rank, reverse=True)
        count = max(effort.finalists, round(len(mine) * KEEP))
        kept += [each.layout for each in mine[:count]]
        aggregated = next((each.layout for each in mine if each.layout.is_aggregated), None)
        if aggregated is not None and aggregated not in kept:
            kept.append(aggregated)
    return kept


def rank(found: Evaluation) -> tuple[bool, float, float, float]:
    """More is better: attainment, then how far below the objectives the latencies are."""
    return found.complete, round(found.joint, 3), -(found.ttft_p90_s or 0.0), -(found.tpot_p90_s or 0.0)
