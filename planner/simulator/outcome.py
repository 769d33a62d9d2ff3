"""The result of replaying a trace, simulated or measured. Both have the same form, so they can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.simulator.measurements import IntervalHistogram, RunMeasurements
from planner.simulator.setup import Slo
from planner.traces.hits import infinite_cache_hits
from planner.traces.trace import TrafficTrace
from tandem.request import RequestState

QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """Percentiles and mean in seconds. None: there were no values."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None = None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> LatencyQuantiles:
        seen = seconds[~np.isnan(seconds)]
        if not len(seen):
            return cls(None, None, None, None)
        p50, p90, p95, p99 = np.quantile(seen, list(QUANTILES.values())).tolist()
        return cls(p50, p90, p95, p99, float(seen.mean()))

    @classmethod
    def of_intervals(cls, intervals: IntervalHistogram) -> LatencyQuantiles:
        p50, p90, p95, p99 = (intervals.percentile(share) for share in QUANTILES.values())
        return cls(p50, p90, p95, p99)


@dataclass(frozen=True, slots=True)
class Attainment:
    """Share of all requests that met each objective; unfinished requests meet none. None: no objective."""

    ttft: float | None
    tpot: float | None
    joint: float | None
    of_class: Mapping[str, float] = field(default_factory=dict)  # both, of the requests of each class with its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`seconds`: from first arrival to last token. Rates are per second between first and last arrival. None: unknown,
    such as the queue time inside another server."""

    trace: str
    notes: tuple[str, ...]
    requests: int
    finished: int
    rejected: int
    failed: int
    refusals: Mapping[str, int]
    span_s: float
    seconds: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    served_tokens_per_s: float  # of answers, per second between first arrival and last token
    ttft_s: LatencyQuantiles
    tpot_s: LatencyQuantiles
    itl_s: LatencyQuantiles
    e2e_s: LatencyQuantiles
    queue_s: LatencyQuantiles  # in the router's queue
    slo: Slo
    attainment: Attainment
    goodput_per_s: float | None
    hit_rate: float | None
    possible_hit_rate: float
    handoffs: int | None
    kv_bytes_moved: float | None
    complete: bool  # False: the run was stopped early

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome_fields(trace: TrafficTrace, slo: Slo, measurements: RunMeasurements) -> dict[str, Any]:
    """All fields of Outcome except `kv_bytes_moved`."""
    finished = measurements.finished
    ttft_s = measurements.first_token_s - trace.arrival_s
    e2e_s = np.where(finished, measurements.last_token_s - trace.arrival_s, np.nan)
    intervals = trace.output_tokens - 1
    tpot_s = np.full(len(trace), np.nan)
    several = finished & (intervals > 0)
    tpot_s[several] = (measurements.last_token_s - measurements.first_token_s)[several] / intervals[several]
    attainment, good = _attained(slo, trace, finished, ttft_s, tpot_s)
    span_s = trace.span_s or 1.0
    seconds = float(np.nanmax(np.concatenate([measurements.last_token_s, [span_s]])))
    output_tokens = float(trace.output_tokens[finished].sum())
    prompt_tokens = int(trace.prompt_tokens[finished].sum())
    return {
        "trace": trace.name,
        "notes": trace.notes,
        "requests": len(trace),
        "finished": int(finished.sum()),
        "rejected": measurements.count(RequestState.REJECTED),
        "failed": measurements.count(RequestState.FAILED),
        "refusals": dict(measurements.refusals),
        "span_s": span_s,
        "seconds": seconds,
        "requests_per_s": len(trace) / span_s,
        "prompt_tokens_per_s": prompt_tokens / span_s,
        "output_tokens_per_s": output_tokens / span_s,
        "served_tokens_per_s": output_tokens / seconds,
        "ttft_s": LatencyQuantiles.of(ttft_s),
        "tpot_s": LatencyQuantiles.of(tpot_s),
        "itl_s": LatencyQuantiles.of_intervals(measurements.intervals),
        "e2e_s": LatencyQuantiles.of(e2e_s),
        "queue_s": LatencyQuantiles.of(measurements.dispatched_s - trace.arrival_s),
        "slo": slo,
        "attainment": attainment,
        "goodput_per_s": None if good is None else good / span_s,
        "hit_rate": float(measurements.cached_tokens[finished].sum()) / max(1, prompt_tokens),
        "possible_hit_rate": infinite_cache_hits(trace).token_hit_rate,
        "handoffs": measurements.handoffs,
        "complete": measurements.ended == len(trace),
    }


def _attained(
    slo: Slo,
    trace: TrafficTrace,
    finished: NDArray[np.bool_],
    ttft_s: NDArray[np.float64],
    tpot_s: NDArray[np.float64],
) -> tuple[Attainment, int | None]:
    """A request of one token has no TPOT and meets that objective."""
    if not (slo.has_ttft or slo.has_tpot):
        return Attainment(None, None, None), None
    total, (most_ttft_s, most_tpot_s) = len(finished), slo.limits(trace)
    ttft, tpot = finished & (ttft_s <= most_ttft_s), finished & ~(tpot_s > most_tpot_s)
    joint = ttft & tpot
    of_class: dict[str, float] = {}
    if slo.of_class:
        label = np.zeros(total, np.int32) if trace.label is None else trace.label
        for name in sorted({name for name, _ in trace.labels}):
            own = np.isin(label, [number for number, each in enumerate(trace.labels) if each[0] == name])
            if own.any():
                of_class[name] = float(joint[own].mean())
    shares = (float(ttft.mean()) if slo.has_ttft else None, float(tpot.mean()) if slo.has_tpot else None)
    return Attainment(*shares, float(joint.mean()), of_class), int(joint.sum())
