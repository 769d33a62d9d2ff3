"""Finds the cheapest layouts that meet the goal: those that simulating every layout would find.

Of each kind, layouts are simulated from the cheapest up until one meets the goal, and each until so many requests have
missed their objectives that it cannot. Pools of disaggregated layouts are simulated alone first, beside another that is
never short and with handoffs that take no time: too few workers there are too few beside any other pool.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.search.analytic import allowed_misses
from planner.search.evaluate import Evaluation, Job
from planner.search.layout import ClusterLayout

DEARER = 2.0  # how many times the price of an aggregated layout disaggregated ones may take to be looked at
CHEAPER = 3  # prices below the plan's of which the closest layout is simulated to its end

Run = Callable[[str, Sequence[Job]], list[Evaluation]]
Pool = tuple[int, int]  # width, tokens of a step
WorkersOf = Callable[[ClusterLayout], int]


@dataclass(frozen=True, slots=True)
class Race:
    """`price`: what layouts are ordered by. `fastest`: the widths of the workers that prefill and decode fastest.
    `is_sure`: whether a layout that meets the goal may be the plan. `at_once`: simulations that run in parallel.
    `load`: factor on the rate of the traffic."""

    requests: int
    attainment: float
    max_devices: int
    price: Callable[[ClusterLayout], float]
    fastest: tuple[int, int]
    run: Run
    is_sure: Callable[[Evaluation], bool] = lambda met: True
    at_once: int = 1
    load: float = 1.0

    def finalists(self, layouts: Sequence[ClusterLayout]) -> list[Evaluation]:
        """The layouts that meet the goal at the lowest price of each kind, and the closest at the prices below it; or
        the closest of all, if none does. All are simulated to their end."""
        together = self._cheapest_aggregated(layouts)
        apart = self._cheapest_disaggregated(layouts, DEARER * self._best_price(together))
        if not together and not apart:
            most = max((each.devices for each in layouts), default=0)
            apart = self._from_the_cheapest_up([each for each in layouts if each.devices == most])
        met = [each for each in (*together, *apart) if self.meets(each)]
        closest = [*self._closest(together), *self._closest(apart)] if met else _furthest((*together, *apart))
        return met + (self.run("the closest below", [self._job(each) for each in closest]) if closest else [])

    def is_met(self, layouts: Sequence[ClusterLayout]) -> bool:
        """Whether a layout meets the goal."""
        return (
            self.best(self._cheapest_aggregated(layouts)) is not None
            or self.best(self._cheapest_disaggregated(layouts, math.inf)) is not None
        )

    def best(self, found: Sequence[Evaluation]) -> Evaluation | None:
        """Of those that meet the goal at the lowest price; None: no one does surely."""
        met = sorted(filter(self.meets, found), key=rank, reverse=True)
        return next(
            (each for each in sorted(met, key=lambda each: self.price(each.layout)) if self.is_sure(each)), None
        )

    def meets(self, found: Evaluation) -> bool:
        return found.meets(self.attainment)

    def _best_price(self, found: Sequence[Evaluation]) -> float:
        best = self.best(found)
        return math.inf if best is None else self.price(best.layout)

    def judge(self, what: str, layouts: Sequence[ClusterLayout], *, free_handoffs: bool = False) -> list[Evaluation]:
        """Each up to the request with which it cannot meet the goal."""
        most = allowed_misses(self.attainment, self.requests)
        return self.run(what, [replace(self._job(each, most), free_handoffs=free_handoffs) for each in layouts])

    def _job(self, layout: ClusterLayout, most_misses: int | None = None) -> Job:
        return Job(layout, self.requests, load=self.load, most_misses=most_misses)

    # --- pools alone -------------------------------------------------------------------------------------------------

    def _ample(self, tp: int) -> int:
        """So many workers of a width that the pool is never short."""
        return max(4, 2 * self.max_devices // tp)

    def _not_hopeless(self, together: Sequence[ClusterLayout]) -> list[ClusterLayout]:
        """Without those of which even an ample number of workers does not meet the goal."""
        ample = {replace(each, decode_workers=self._ample(each.decode_tp)) for each in together}
        judged = self.judge("ample aggregated pools", sorted(ample))
        good = {_decode_pool(each.layout) for each in judged if self.meets(each)}
        return [each for each in together if _decode_pool(each) in good]

    def _without_short_pools(self, separate: Sequence[ClusterLayout]) -> list[ClusterLayout]:
        prefill_tp, decode_tp = self.fastest
        prefill = {replace(each, decode_workers=self._ample(decode_tp), decode_tp=decode_tp) for each in separate}
        decode = {replace(each, prefill_workers=self._ample(prefill_tp), prefill_tp=prefill_tp) for each in separate}
        prefillers = self._least("prefill pools alone", prefill, _prefill_pool, lambda each: each.prefill_workers)
        decoders = self._least("decode pools alone", decode, _decode_pool, lambda each: each.decode_workers)
        return [
            each
            for each in separate
            if each.prefill_workers >= prefillers.get(_prefill_pool(each), math.inf)
            and each.decode_workers >= decoders.get(_decode_pool(each), math.inf)
        ]

    def _least(
        self, what: str, layouts: set[ClusterLayout], pool: Callable[[ClusterLayout], Pool], workers: WorkersOf
    ) -> dict[Pool, int]:
        """The fewest workers of each pool that meet the goal; pools of which no number does are missing."""
        left: dict[Pool, list[ClusterLayout]] = defaultdict(list)
        for each in sorted(layouts, key=workers, reverse=True):
            left[pool(each)].append(each)
        least: dict[Pool, int] = {}
        while left:
            judged = self.judge(what, [each.pop() for each in left.values()], free_handoffs=True)
            least |= {pool(each.layout): workers(each.layout) for each in judged if self.meets(each)}
            left = {key: each for key, each in left.items() if each and key not in least}
        return least

    # --- whole layouts -----------------------------------------------------------------------------------------------

    def _cheapest_aggregated(self, layouts: Sequence[ClusterLayout]) -> list[Evaluation]:
        return self._from_the_cheapest_up(self._not_hopeless([each for each in layouts if each.is_aggregated]))

    def _cheapest_disaggregated(self, layouts: Sequence[ClusterLayout], most_price: float) -> list[Evaluation]:
        separate = [each for each in layouts if not each.is_aggregated and self.price(each) <= most_price]
        return self._from_the_cheapest_up(self._without_short_pools(separate))

    def _from_the_cheapest_up(self, layouts: Sequence[ClusterLayout]) -> list[Evaluation]:
        """Up to the first price that meets the goal."""
        tried: list[Evaluation] = []
        for batch in self._by_price(layouts):
            kind = "aggregated" if batch[0].is_aggregated else "disaggregated"
            most = max(each.devices for each in batch)
            tried += self.judge(f"{kind}, up to {most} devices", batch)
            if self.best(tried) is not None:
                break
        return tried

    def _closest(self, tried: Sequence[Evaluation]) -> list[ClusterLayout]:
        """The closest of each price below the cheapest that meets the goal."""
        most = self._best_price(tried)
        best: dict[float, ClusterLayout] = {}
        for layout in _furthest([each for each in tried if not self.meets(each)], len(tried)):
            best.setdefault(self.price(layout), layout)
        return [best[at] for at in sorted(at for at in best if at < most)[-CHEAPER:]]

    def _by_price(self, layouts: Sequence[ClusterLayout]) -> Iterator[list[ClusterLayout]]:
        """All of a price together, and of following prices until there are as many as run at once."""
        batch: list[ClusterLayout] = []
        for each in sorted(layouts, key=lambda layout: (self.price(layout), layout)):
            if len(batch) >= self.at_once and self.price(batch[-1]) < self.price(each):
                yield batch
                batch = []
            batch.append(each)
        if batch:
            yield batch


def _prefill_pool(layout: ClusterLayout) -> Pool:
    return layout.prefill_tp, layout.step_tokens


def _decode_pool(layout: ClusterLayout) -> Pool:
    return layout.decode_tp, layout.step_tokens


def _furthest(tried: Sequence[Evaluation], most: int = CHEAPER) -> list[ClusterLayout]:
    """Those that came furthest before they had missed too often."""
    return [each.layout for each in sorted(tried, key=rank, reverse=True)[:most]]


def rank(found: Evaluation) -> tuple[bool, float, float, float]:
    """Sort key, higher is better: attainment, then lower latencies."""
    return found.complete, round(found.joint, 3), -(found.ttft_p90_s or 0.0), -(found.tpot_p90_s or 0.0)
