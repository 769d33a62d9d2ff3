"""What changed between two plans as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import plotly.graph_objects as go

from planner.pages.page import Chart, html_page
from planner.search.plan_changes import PlanChanges, layout_in

BEFORE, AFTER = "#afb8c1", "#1f6feb"


def changes_page(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], rows: list[tuple[str, str, str, str]]
) -> str:
    """`names`: of both plans. `rows`: of the table: metric, both values, difference; as text."""
    found = PlanChanges.between(a, b)
    first, second = (escape(each) for each in names)
    asked = "".join(
        f"<tr><td>{escape(what)}</td><td class='text'>{escape(one)}</td><td class='text'>{escape(other)}</td></tr>"
        for what, one, other in found.asked
    )
    same = "" if asked else "<p class='note'>Both plans were asked the same.</p>"
    head = f"<tr><th></th><th class='text'>{first}</th><th class='text'>{second}</th></tr>"
    figures = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    one, other = (escape(each) for each in found.layouts)
    return html_page(
        f"{names[0]} and {names[1]}",
        f"<h1>What changed</h1><div class='plan'><p><b>{one}</b> became <b>{other}</b>.</p></div>"
        f"<h2>What was asked</h2>{same}<table>{head if asked else ''}{asked}</table>",
        [
            Chart("layouts", "Layouts by devices", _layouts(a, b, names)),
            Chart("conditions", "Under other conditions", _conditions(found, a, b, names)),
        ],
        f"<h2>What came of it</h2><table><tr><th></th><th>{first}</th><th>{second}</th><th>difference</th></tr>"
        f"{figures}</table>",
    )


def _layouts(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> go.Figure:
    """Those simulated to their end, and an arrow from one plan to the other."""
    figure, ends = go.Figure(), []
    for plan, name, color in ((a, names[0], BEFORE), (b, names[1], AFTER)):
        shown = plan["finalists"]
        figure.add_scatter(
            x=[layout_in(each).devices for each in shown], y=[100 * each["joint"] for each in shown],
            mode="markers", name=name, text=[str(layout_in(each)) for each in shown], hoverinfo="text+x+y",
            marker={"color": color, "size": 9},
        )  # fmt: skip
        if (chosen := plan.get("chosen")) is not None:
            ends.append((layout_in(chosen).devices, 100 * chosen["joint"]))
            figure.add_scatter(
                x=ends[-1][:1], y=ends[-1][1:], mode="markers", showlegend=False, hoverinfo="skip",
                marker={"color": color, "size": 17, "symbol": "circle-open", "line": {"width": 3}},
            )  # fmt: skip
    if len(ends) == 2 and ends[0] != ends[1]:
        (x, y), (to_x, to_y) = ends
        figure.add_annotation(
            x=to_x, y=to_y, ax=x, ay=y, axref="x", ayref="y", showarrow=True, arrowhead=2, arrowwidth=2, text="",
            arrowcolor="#1f2328", standoff=9, startstandoff=9,
        )  # fmt: skip
    figure.update_layout(xaxis_title="devices", yaxis_title="% of requests within objectives")
    return figure


def _conditions(found: PlanChanges, a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> go.Figure:
    figure = go.Figure()
    titles = [each.metric for each in found.conditions]
    for name, color, shares in (
        (names[0], BEFORE, [each.a for each in found.conditions]),
        (names[1], AFTER, [each.b for each in found.conditions]),
    ):
        lengths = [None if share is None else 100 * share for share in shares]
        figure.add_bar(y=titles, x=lengths, name=name, orientation="h", marker={"color": color})
    for goal in {plan["goal"].get("attainment") for plan in (a, b)} - {None}:
        figure.add_vline(x=100 * goal, line_dash="dot")
    figure.update_layout(barmode="group", xaxis_title="% within objectives")
    figure.update_xaxes(range=[0, 105])
    figure.update_yaxes(automargin=True, autorange="reversed")
    return figure
