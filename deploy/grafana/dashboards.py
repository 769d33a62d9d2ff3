"""All dashboards, by file name."""

from __future__ import annotations

from deploy.grafana.cache import CACHE
from deploy.grafana.capacity import CAPACITY
from deploy.grafana.handoff import HANDOFF
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import Dashboard
from deploy.grafana.ttft import TTFT

DASHBOARDS: dict[str, Dashboard] = {f"{each.uid}.json": each for each in (OVERVIEW, TTFT, HANDOFF, CACHE, CAPACITY)}
