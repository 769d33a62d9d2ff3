"""The parts of a dashboard as data, and their conversion to Grafana's JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.promql import QUANTILES, percentile

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "tandem"


class Kind(StrEnum):
    LINES = "lines"
    STACK = "stack"
    STAT = "stat"
    HEATMAP = "heatmap"  # its one query returns a histogram's buckets, by le


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`text` explains the panel and how to read it. `colours_from` replaces `colour` from a value on."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    maximum: float | None = None
    colour: str = "green"
    colours_from: tuple[tuple[float, str], ...] = ()


def number(title: str, text: str, unit: str, expr: str, legend: str = "", **more: Any) -> Panel:
    """By default a quarter of a row."""
    return Panel(title, text, unit, (Query(expr, legend),), kind=Kind.STAT, **{"width": 6, **more})


def lines(title: str, text: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Each query with its legend."""
    return Panel(title, text, unit, tuple(Query(*query) for query in queries), **more)


def stack(title: str, text: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Each query with its legend."""
    return lines(title, text, unit, *queries, kind=Kind.STACK, **more)


def percentiles(title: str, text: str, histogram: str, matching: str = "", **more: Any) -> Panel:
    """Percentiles of a histogram of seconds."""
    queries = [(percentile(each, histogram, matching), f"p{100 * each:g}") for each in QUANTILES]
    return lines(title, text, "s", *queries, **more)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Grafana's JSON model."""
        built = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.text)
            .tags([TAG])
            .time("now-1h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .editable()
            .link(_links())
            .annotation(_alerts())
        )
        for variable in _variables():
            built = built.with_variable(variable)
        ids = itertools.count(1)
        for row in self.rows:
            built = built.with_row(dashboard.Row(row.title).id(next(ids)))
            for panel in row.panels:
                built = built.with_panel(_panel(panel).id(next(ids)))
        return json.dumps(built.build(), cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


def _links() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Tandem")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _alerts() -> dashboard.AnnotationQuery:
    """Marks in every graph when one of Tandem's alerts started and ended."""
    firing = 'ALERTS{alertname=~"Tandem.*",alertstate="firing",namespace=~"$namespace",job=~"$job"}'
    return dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red").expr(firing)


def _variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    """`namespace` and `job` identify a cluster. Without a namespace label, the only choice is All."""
    names = {"namespace": "tandem_workers", "job": "tandem_workers", "model": "tandem_worker_up"}
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        *(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(f"label_values({metric}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(selected=True, text="All", value="$__all"))
            for name, metric in names.items()
        ),
    ]


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    built: timeseries.Panel | stat.Panel | heatmap.Panel
    if panel.kind is Kind.STAT:
        built = stat.Panel().height(4).graph_mode(BigValueGraphMode.AREA).thresholds(_thresholds(panel))
    elif panel.kind is Kind.HEATMAP:
        scheme = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(32)
        built = heatmap.Panel().height(8).color(scheme).y_axis(heatmap.YAxisConfig().unit(panel.unit))
    else:
        built = _lines(panel)
    built = built.title(panel.title).description(panel.text).unit(panel.unit).span(panel.width).datasource(SOURCE)
    built = built.min(0.0)
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    for place, query in enumerate(panel.queries):
        built = built.with_target(_target(query, place, panel.kind))
    return built


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "max", "lastNotNull"])
    )
    built = (
        timeseries.Panel()
        .height(8)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .show_points(VisibilityMode.NEVER)
        .fill_opacity(40.0 if panel.kind is Kind.STACK else 8.0)
    )
    if panel.kind is Kind.STACK:
        built = built.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return built


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None, color=panel.colour)]
    steps += [Threshold(value=value, color=colour) for value, colour in panel.colours_from]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _target(query: Query, place: int, kind: Kind) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(chr(ord("A") + place)).expr(query.expr).legend_format(query.legend)
    target = target.datasource(SOURCE).range()
    return target.format(PromQueryFormat.HEATMAP) if kind is Kind.HEATMAP else target
