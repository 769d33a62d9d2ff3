"""The router's metric types expose the same text as the client library's."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.observe.metrics import instruments

BOUNDS = (0.1, 1.0, 2.5)
VALUES = (0.0, 0.1, 0.10001, 1.0, 2.0, 2.5, 2.6, 1e9)


def exposition(registry: CollectorRegistry) -> list[str]:
    """Without the creation times that the library adds."""
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


def test_they_are_exposed_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for kinds, registry in ((instruments, ours), (prometheus_client, theirs)):
        counter = kinds.Counter("c", "Counted.", ("a", "b"), registry=registry)
        for labels in (("1", 'quo"ted'), ("1", 'quo"ted'), ("2", "line\nbreak")):
            counter.labels(*labels).inc()
        counter.labels("1", "x").inc(2.5)
        gauge = kinds.Gauge("g", "Now.", ("a",), registry=registry)
        gauge.labels("1").set(7)
        histogram = kinds.Histogram("h_seconds", "Took.", ("a",), buckets=BOUNDS, registry=registry)
        for value in VALUES:
            histogram.labels("1").observe(value)
    assert exposition(ours) == exposition(theirs)


def test_as_many_labels_as_names() -> None:
    counter = instruments.Counter("c", "Counted.", ("a", "b"), registry=CollectorRegistry())
    with pytest.raises(ValueError, match="expected labels"):
        counter.labels("1")


def test_a_counter_shows_what_may_happen_before_it_does() -> None:
    registry = CollectorRegistry()
    counter = instruments.Counter("c", "Counted.", ("a", "b"), registry=registry)
    counter.begin(("1", "2"), ("x",))
    counter.labels("2", "x").inc()
    samples = [line for line in exposition(registry) if not line.startswith("#")]
    assert samples == ['c_total{a="1",b="x"} 0.0', 'c_total{a="2",b="x"} 1.0']
