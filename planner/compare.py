"""Compares two results of the same form: prediction and measurement, two ratios, Tandem and another server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Unit(StrEnum):
    SECONDS = "s"
    PER_SECOND = "1/s"
    SHARE = "share"
    COUNT = "count"
    BYTES = "bytes"
    DOLLARS = "$"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of results A and B. None: that result lacks the metric."""

    metric: str
    unit: Unit
    a: float | None
    b: float | None

    @property
    def percent(self) -> float | None:
        """B minus A in percent of A. None for shares, if A is 0, or if a value is missing."""
        if self.unit is Unit.SHARE or self.a is None or self.b is None or not self.a:
            return None
        return 100 * (self.b - self.a) / self.a

    @property
    def points(self) -> float | None:
        """B minus A in percentage points, for shares. None if a value is missing."""
        if self.unit is not Unit.SHARE or self.a is None or self.b is None:
            return None
        return 100 * (self.b - self.a)

    def to_json(self) -> dict[str, Any]:
        fields = {"metric": self.metric, "unit": self.unit.value, "a": self.a, "b": self.b}
        return fields | {"difference_percent": self.percent, "difference_points": self.points}


_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")
_PERCENTILES = ("p50", "p90", "p95", "p99")
_SINGLE = {
    "attainment.ttft": Unit.SHARE,
    "attainment.tpot": Unit.SHARE,
    "attainment.joint": Unit.SHARE,
    "goodput_per_s": Unit.PER_SECOND,
    "requests_per_s": Unit.PER_SECOND,
    "prompt_tokens_per_s": Unit.PER_SECOND,
    "output_tokens_per_s": Unit.PER_SECOND,
    "served_tokens_per_s": Unit.PER_SECOND,
    "hit_rate": Unit.SHARE,
    "requests": Unit.COUNT,
    "finished": Unit.COUNT,
    "rejected": Unit.COUNT,
    "failed": Unit.COUNT,
    "handoffs": Unit.COUNT,
    "kv_bytes_moved": Unit.BYTES,
}
METRICS = {f"{name}.{share}": Unit.SECONDS for name in _LATENCIES for share in _PERCENTILES} | _SINGLE


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[MetricRow]:
    """Every metric that at least one of the two has."""
    return [MetricRow(metric, unit, *values) for metric, unit, values in side_by_side((a, b))]


def side_by_side(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Unit, list[float | None]]]:
    """Every metric that at least one of `results` has, and its values."""
    for metric, unit in METRICS.items():
        values = [_number(result, metric) for result in results]
        if any(value is not None for value in values):
            yield metric, unit, values


def doubts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why the two results may not be comparable."""
    for name, what in (("trace", "traces"), ("requests", "numbers of requests"), ("slo", "objectives")):
        if a.get(name) != b.get(name):
            yield f"different {what}: {_text(a.get(name))} and {_text(b.get(name))}"
    rates = _number(a, "requests_per_s"), _number(b, "requests_per_s")
    if rates[0] and rates[1] and abs(rates[1] / rates[0] - 1) > 0.02:
        yield f"different load: {rates[0]:.2f} and {rates[1]:.2f} requests/s"
    for name, each in (("A", a), ("B", b)):
        if each.get("complete") is False:
            yield f"{name} was stopped early"


def is_result(found: object) -> bool:
    """Whether `found` is a JSON result of `tandem simulate` or `tandem bench`."""
    return isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("ttft_s", "tpot_s", "slo"))


def _number(result: Mapping[str, Any], metric: str) -> float | None:
    value: object = result
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None) or "none"
    return str(value)
