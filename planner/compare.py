"""Two results of one form side by side: prediction and measurement, one ratio and another, Tandem and a rival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Unit(StrEnum):
    SECONDS = "s"
    PER_SECOND = "1/s"
    SHARE = "share"
    COUNT = "count"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """`a`, `b` None: that result does not say."""

    metric: str
    unit: Unit
    a: float | None
    b: float | None

    @property
    def percent(self) -> float | None:
        """By how much B is above A, in percent of A. None for shares, and where A is 0 or one is not known."""
        if self.unit is Unit.SHARE or self.a is None or self.b is None or not self.a:
            return None
        return 100 * (self.b - self.a) / self.a

    @property
    def points(self) -> float | None:
        """The same for shares, in percentage points."""
        if self.unit is not Unit.SHARE or self.a is None or self.b is None:
            return None
        return 100 * (self.b - self.a)

    def to_json(self) -> dict[str, Any]:
        said = {"metric": self.metric, "unit": self.unit.value, "a": self.a, "b": self.b}
        return said | {"difference_percent": self.percent, "difference_points": self.points}


_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")
_SHARES = ("p50", "p90", "p95", "p99")
_TOP = {
    "attainment.ttft": Unit.SHARE,
    "attainment.tpot": Unit.SHARE,
    "attainment.joint": Unit.SHARE,
    "goodput_per_s": Unit.PER_SECOND,
    "requests_per_s": Unit.PER_SECOND,
    "prompt_tokens_per_s": Unit.PER_SECOND,
    "output_tokens_per_s": Unit.PER_SECOND,
    "hit_rate": Unit.SHARE,
    "requests": Unit.COUNT,
    "finished": Unit.COUNT,
    "rejected": Unit.COUNT,
    "failed": Unit.COUNT,
    "handoffs": Unit.COUNT,
    "kv_bytes_moved": Unit.BYTES,
}
METRICS = {f"{name}.{share}": Unit.SECONDS for name in _LATENCIES for share in _SHARES} | _TOP


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[MetricRow]:
    """Every metric that at least one of the two knows."""
    lines = [MetricRow(metric, unit, _number(a, metric), _number(b, metric)) for metric, unit in METRICS.items()]
    return [line for line in lines if line.a is not None or line.b is not None]


def doubts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Why the two may say little about each other."""
    for name, what in (("trace", "traces"), ("requests", "numbers of requests"), ("slo", "objectives")):
        if a.get(name) != b.get(name):
            yield f"different {what}: {_said(a.get(name))} and {_said(b.get(name))}"
    rates = _number(a, "requests_per_s"), _number(b, "requests_per_s")
    if rates[0] and rates[1] and abs(rates[1] / rates[0] - 1) > 0.02:
        yield f"different load: {rates[0]:.2f} and {rates[1]:.2f} requests/s"
    for name, each in (("A", a), ("B", b)):
        if each.get("complete") is False:
            yield f"{name} was ended early"


def is_result(found: object) -> bool:
    """Whether it is what `simulate` and `bench` print as JSON."""
    return isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("ttft_s", "tpot_s", "slo"))


def _number(result: Mapping[str, Any], metric: str) -> float | None:
    value: object = result
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None) or "none"
    return str(value)
