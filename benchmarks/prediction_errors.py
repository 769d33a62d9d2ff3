"""How far simulated latencies are from measured ones, with the interval in which the error of many runs would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.handoff_figures import Figure
from planner.traces.trace import MeasuredTimes, drawn_blocks

LATENCIES = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
METRICS = (*LATENCIES, "end to end", "attainment")  # errors are relative; of attainment, a difference of shares
TARGETS = {"latency": 0.05, "e2e": 0.026, "attainment": 0.02}
WORST_TARGETS = {85: 0.12, 95: 0.15}
SHARE_TARGET = 0.9  # of the cells
DRAWS = 400
SURE = (0.05, 0.95)
_OBJECTIVES = 0.9  # quantile of what the simulation says: a tenth misses them, where attainment is most sensitive

Rows = NDArray[np.float64]  # [requests, 3]: TTFT, TPOT, end to end, in seconds; NaN: the request has none


@dataclass(frozen=True, slots=True)
class Run:
    """The same requests, measured and simulated."""

    measured: MeasuredTimes
    simulated: MeasuredTimes
    output_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Error:
    """In nine of ten sets of runs it would be from `low` to `high`."""

    value: float
    low: float
    high: float

    def meets(self, target: float) -> bool:
        """Whether the interval reaches `target`."""
        return self.low <= target and self.high >= -target


@dataclass(frozen=True, slots=True)
class CellErrors:
    """`capacity`: its relative error. `drift`: by how much probes of the machine's speed differed."""

    name: str
    share: int
    requests: int
    capacity: float
    drift: float
    of: dict[str, Error]

    @property
    def worst(self) -> float:
        return max(abs(self.of[name].value) for name in LATENCIES)

    def meets(self, kind: str) -> bool:
        names = {"latency": LATENCIES, "e2e": ("end to end",), "attainment": ("attainment",)}[kind]
        return all(self.of[name].meets(TARGETS[kind]) for name in names)

    def to_json(self) -> dict[str, Any]:
        errors = {name: [round(each, 4) for each in (e.value, e.low, e.high)] for name, e in self.of.items()}
        about = {"cell": self.name, "share": self.share, "requests": self.requests}
        return about | {"capacity": round(self.capacity, 4), "drift": round(self.drift, 4), "errors": errors}


def errors_of(name: str, share: int, runs: Sequence[Run], capacity: float, drift: float) -> CellErrors:
    """The interval comes from drawing runs, and of each blocks of requests in a row."""
    measured, simulated = ([_rows(times(run), run) for run in runs] for times in (_measured, _simulated))
    objectives = np.nanquantile(np.concatenate(simulated), _OBJECTIVES, axis=0)[:2]
    random = np.random.default_rng(0)

    def error(parts: Sequence[tuple[int, NDArray[np.int64] | slice]]) -> NDArray[np.float64]:
        both = (np.concatenate([rows[run][index] for run, index in parts]) for rows in (measured, simulated))
        seen, predicted = (_values(rows, objectives) for rows in both)
        found: NDArray[np.float64] = np.append(predicted[:-1] / seen[:-1] - 1, predicted[-1] - seen[-1])
        return found

    def drawn() -> list[tuple[int, NDArray[np.int64] | slice]]:
        chosen = random.integers(len(runs), size=len(runs)).tolist()
        return [(run, drawn_blocks(len(measured[run]), random)) for run in chosen]

    values = error([(run, slice(None)) for run in range(len(runs))])
    low, high = np.quantile([error(drawn()) for _ in range(DRAWS)], SURE, axis=0)
    of = dict(zip(METRICS, map(Error, values.tolist(), low.tolist(), high.tolist()), strict=True))
    return CellErrors(name, share, sum(map(len, measured)), capacity, drift, of)


def figures_of(cell: CellErrors) -> Iterator[Figure]:
    """The largest error of a percentile, and that of the attainment, in points."""
    yield Figure(f"sim.latency_error_{cell.share}_{cell.name}", round(cell.worst, 3), "share", TARGETS["latency"])
    points = 100 * abs(cell.of["attainment"].value)
    yield Figure(f"sim.attainment_error_{cell.share}_{cell.name}", round(points, 1), "points", 2.0)


def figures_of_all(cells: Sequence[CellErrors]) -> Iterator[Figure]:
    """Shares of the cells whose intervals reach the targets, the worst cell, and the machine's drift."""
    if not cells:
        return
    share = cells[0].share
    for kind in TARGETS:
        met = sum(each.meets(kind) for each in cells) / len(cells)
        yield Figure(f"sim.{kind}_error_{share}", round(met, 3), "share of cells", SHARE_TARGET, met / SHARE_TARGET)
    worst, target = max(each.worst for each in cells), WORST_TARGETS.get(share)
    yield Figure(
        f"sim.latency_error_{share}_worst", round(worst, 3), "share", target, None if target is None else worst / target
    )
    yield Figure(f"sim.capacity_error_{share}_worst", round(max(abs(each.capacity) for each in cells), 3), "share")
    yield Figure(f"sim.drift_{share}", round(max(each.drift for each in cells), 3), "share")


def _measured(run: Run) -> MeasuredTimes:
    return run.measured


def _simulated(run: Run) -> MeasuredTimes:
    return run.simulated


def _rows(times: MeasuredTimes, run: Run) -> Rows:
    intervals = run.output_tokens - 1
    tpot_s = np.where(intervals > 0, times.decode_s / np.maximum(1, intervals), np.nan)
    return np.stack([times.ttft_s, tpot_s, times.e2e_s], axis=1)


def _values(rows: Rows, objectives: NDArray[np.float64]) -> NDArray[np.float64]:
    """As METRICS."""
    ttft_s, tpot_s, e2e_s = rows.T
    met = (ttft_s <= objectives[0]) & ~(tpot_s > objectives[1])
    quantiles = [np.nanquantile(each, [0.5, 0.95]) for each in (ttft_s, tpot_s)]
    return np.array([*quantiles[0], *quantiles[1], np.nanmean(e2e_s), met.mean()])
