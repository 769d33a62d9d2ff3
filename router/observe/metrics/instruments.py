"""Counters, gauges and histograms without locks, for the event loop's thread only.

Some change with every token, and the client library's types take several times as long. They are collected into the
library's registry. Label values must be bounded: children are never removed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Child = TypeVar("Child")


class Number:
    """One counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class Buckets:
    """One histogram. `counts`: observations up to each bound, then those above the last."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        bounds, counts = self._bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)


class _Family(Collector, Generic[Child]):
    def __init__(self, name: str, text: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], Child] = {}
        registry.register(self)

    def labels(self, *values: str) -> Child:
        """The child with these label values, in the order of the names. Raises ValueError if the number differs."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name}: expected labels {self._labelnames}, got {values}")
            child = self._children[values] = self._new()
        return child

    def begin(self, *values: Iterable[str]) -> None:
        """Shows the children of all combinations, in the order of the names, before anything happens: `rate()` and
        `increase()` see the first event only if there was a sample before it."""
        for each in itertools.product(*values):
            self.labels(*map(str, each))

    def renamed(self, name: str, labels: Mapping[str, str], **only: str) -> Metric:
        """The family under another name and other names of labels. `only`: children with these values, which the result
        then has no labels for."""
        (family,) = self.collect()
        found = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if all(sample.labels[label] == value for label, value in only.items()):
                kept = {labels.get(label, label): value for label, value in sample.labels.items() if label not in only}
                found.add_sample(name + sample.name.removeprefix(family.name), kept, sample.value)
        return found

    def _new(self) -> Child:
        raise NotImplementedError


class Counter(_Family[Number]):
    def _new(self) -> Number:
        return Number()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for labels, child in self._children.items():
            family.add_metric(labels, child.value)
        yield family


class Gauge(_Family[Number]):
    def _new(self) -> Number:
        return Number()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labelnames)
        for labels, child in self._children.items():
            family.add_metric(labels, child.value)
        yield family


class Histogram(_Family[Buckets]):
    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(buckets)
        super().__init__(name, text, labelnames, registry=registry)

    def _new(self) -> Buckets:
        return Buckets(self._bounds)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for labels, child in self._children.items():
            family.add_metric(labels, cumulated(self._bounds, child.counts), child.total)
        yield family


def cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative Prometheus buckets. `counts` has one element more than `bounds`."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
