"""The simulations of a search: layouts with resampled traces, and under other conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.search.evaluate import Evaluation, Job, without_worker
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.race import rank
from planner.search.simulation_pool import SimulationPool

SearchProgress = Callable[[str, int, int], None]  # description, jobs done, jobs in all
RESAMPLES = 20
REACH = 3


@dataclass(frozen=True, slots=True)
class Resampled:
    """A layout with `RESAMPLES` resampled traces: with how many of them it meets the goal, and the share of requests
    within their objectives with the second worst and the second best of them."""

    layout: ClusterLayout
    met: int
    low: float
    high: float

    @classmethod
    def of(cls, found: Sequence[Evaluation], attainment: float) -> Resampled:
        joint = sorted(each.joint for each in found)
        return cls(found[0].layout, sum(share >= attainment for share in joint), joint[1], joint[-2])


@dataclass(frozen=True, slots=True)
class Variant:
    """The plan under changed conditions. `evaluation` None: no service without that worker."""

    name: str
    evaluation: Evaluation | None
    meets: bool


def _near(workers: int, least: int) -> range:
    return range(max(least, workers - REACH), workers + REACH + 1)


def _sized(base: ClusterLayout, prefill: int, decode: int) -> ClusterLayout:
    return replace(base, prefill_workers=prefill, prefill_tp=base.prefill_tp if prefill else 1, decode_workers=decode)


class Trials:
    """Runs and counts the simulations of one search."""

    def __init__(
        self, pool: SimulationPool, goal: Goal, price: Callable[[ClusterLayout], float], progress: SearchProgress
    ) -> None:
        self._pool, self._goal, self._price, self._progress = pool, goal, price, progress
        self._resampled: dict[tuple[ClusterLayout, float], Resampled] = {}
        self.simulated = 0

    def is_sure(self, met: Evaluation) -> bool:
        return not self._goal.confidence or self.resampled(met).met >= self._goal.confidence * RESAMPLES - 1e-9

    def resampled(self, found: Evaluation) -> Resampled:
        layout, key = found.layout, (found.layout, found.job.load)
        if key not in self._resampled:
            jobs = [replace(found.job, most_misses=None, resample=1 + number) for number in range(RESAMPLES)]
            self._resampled[key] = Resampled.of(self.run(f"{layout}, resampled traces", jobs), self._goal.attainment)
        return self._resampled[key]

    def around(self, chosen: Evaluation, finalists: Sequence[Evaluation]) -> list[Resampled]:
        """Of the chosen layout, and before it of the best of the next cheaper price."""
        cheaper = [each for each in finalists if self._price(each.layout) < self._price(chosen.layout)]
        best = max(cheaper, key=lambda each: (self._price(each.layout), rank(each)), default=None)
        return [self.resampled(each) for each in (best, chosen) if each is not None]

    def variants(self, chosen: Evaluation, cost_error: float | None) -> list[Variant]:
        """`cost_error`: the mean relative error of the step times."""
        base = replace(chosen.job, most_misses=None)
        jobs = {
            "load -25 %": replace(base, load=0.75 * base.load),
            "load +25 %": replace(base, load=1.25 * base.load),
            "prompts +25 %": replace(base, prompts=1.25),
            "answers +25 %": replace(base, outputs=1.25),
            "one prefill worker lost": without_worker(base, prefill=True),
            "one decode worker lost": without_worker(base, prefill=False),
        }
        if self._goal.slo.has_ttft:
            jobs["late requests refused"] = replace(base, refuses=True)
        if cost_error:
            jobs[f"steps {100 * cost_error:.0f} % slower"] = replace(base, steps=1 + cost_error)
        if chosen.layout.is_aggregated:
            del jobs["one prefill worker lost"]
            jobs["one worker lost"] = jobs.pop("one decode worker lost")
        known = [job for job in jobs.values() if job is not None]
        found = iter(self.run("variants of the plan", known))
        return [self._variant(name, None if job is None else next(found)) for name, job in jobs.items()]

    def grid(self, chosen: Evaluation, finalists: Sequence[Evaluation], least_prefill: int = 0) -> list[Evaluation]:
        """Layouts with up to `REACH` workers of each role more or fewer than the chosen one has."""
        base = chosen.layout
        if base.is_aggregated:  # prefill workers as in the best layout that has some
            apart = (each.layout.prefill_tp for each in finalists if not each.layout.is_aggregated)
            base = replace(base, prefill_tp=next(apart, base.decode_tp))
        jobs = [
            replace(chosen.job, layout=layout, most_misses=None)
            for prefill in _near(base.prefill_workers, least_prefill)
            for decode in _near(base.decode_workers, 1)
            if (layout := _sized(base, prefill, decode)).devices <= self._goal.max_devices
        ]
        return self.run("layouts around the plan", jobs)

    def _variant(self, name: str, found: Evaluation | None) -> Variant:
        return Variant(name, found, found is not None and found.meets(self._goal.attainment))

    def run(self, what: str, jobs: Sequence[Job]) -> list[Evaluation]:
        ended = 0

        def done(_: Evaluation) -> None:
            nonlocal ended
            ended += 1
            self._progress(what, ended, len(jobs))

        self._progress(what, 0, len(jobs))
        self.simulated += len(jobs)
        return self._pool.run(jobs, done)
