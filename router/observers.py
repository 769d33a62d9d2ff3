"""Subscribes all observers to the core's facts. Observers come after those whose records they read."""

from __future__ import annotations

from collections.abc import Sequence

from router.dashboard.feed import Feed
from router.observe.demand import DemandMeter
from router.observe.export import TraceExport
from router.observe.metrics.requests import RouterMetrics
from router.observe.pace_observer import PaceObserver
from router.observe.request_log import RequestLog
from router.observe.request_tap import RequestTap
from router.observe.statistics_meter import StatisticsMeter
from router.observe.trace_store import Traces
from router.probes.health_from_requests import HealthFromRequests
from router.requests.core import RequestCore
from router.requests.facts import Facts
from router.workers.fleet import Fleet
from tandem.config.router import ClassSpec


class Observers:
    """All observers of requests. No lower package imports it."""

    def __init__(
        self,
        facts: Facts,
        core: RequestCore,
        fleet: Fleet,
        metrics: RouterMetrics,
        feed: Feed,
        classes: Sequence[ClassSpec],
        export: TraceExport | None,
    ) -> None:
        self.traces = Traces(fleet)
        self.tap = RequestTap(self.traces)
        self.demand = DemandMeter(classes, fleet)
        self.statistics = StatisticsMeter()
        self.traces.subscribe(facts)
        RequestLog(self.traces).subscribe(facts)
        PaceObserver(fleet).subscribe(facts)
        HealthFromRequests(fleet, core.placer).subscribe(facts)
        self.demand.subscribe(facts)
        self.statistics.subscribe(facts)
        metrics.subscribe(facts, self.traces)
        feed.subscribe(facts)
        self.tap.subscribe(facts)
        if export is not None:
            export.subscribe(facts, self.traces)
        self.traces.subscribe_last(facts)
