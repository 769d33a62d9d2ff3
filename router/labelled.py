"""The client library's metrics, whose `labels` remembers its children: looking one up costs more than counting with it.

Label values are bounded, as for every metric, and children are never removed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Self

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase


class _Remembering(MetricWrapperBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._known: dict[tuple[str, ...], Any] = {}
        super().__init__(*args, **kwargs)

    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Self:
        """By position, or (not remembered) by name."""
        if labelkwargs:
            return super().labels(*labelvalues, **labelkwargs)
        child: Self | None = self._known.get(labelvalues)
        if child is None:
            child = self._known[labelvalues] = super().labels(*labelvalues)
        return child


class Counter(_Remembering, prometheus_client.Counter):
    pass


class Gauge(_Remembering, prometheus_client.Gauge):
    pass


class Histogram(_Remembering, prometheus_client.Histogram):
    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """As the library's, which tries one bucket after another: some are observed for every token."""
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)
