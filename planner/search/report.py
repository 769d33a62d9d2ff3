"""A plan as one self-contained HTML file: tables, and interactive charts with plotly inlined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from planner.search.evaluate import Evaluation
from planner.search.plan import Plan
from tandem.text.words import plural

DISAGGREGATED, AGGREGATED, CHOSEN = "#1f6feb", "#d29922", "#1a7f37"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #d1d9e0 }
th:first-child, td:first-child { text-align: left }
.plan { border-left: 4px solid #1a7f37; padding: .4rem 1rem; background: #f6f8fa }
.miss { border-left: 4px solid #cf222e; padding: .4rem 1rem; background: #f6f8fa }
.chart { height: 420px } .note { color: #59636e; font-size: .9rem }
"""


def html_report(plan: Plan, cost_model: str) -> str:
    """The page loads nothing from the network."""
    figures = [("goodput-cost", _goodput_cost(plan)), ("ttft-tpot", _ttft_tpot(plan))]
    if plan.variants:
        figures.append(("variants", _variants(plan)))
    titles = {
        "goodput-cost": "Goodput against cost",
        "ttft-tpot": "TTFT against TPOT",
        "variants": "The plan under other circumstances",
    }
    charts = "".join(
        f"<h2>{titles[name]}</h2><div class='chart' id='{name}'></div>"
        f"<script>Plotly.newPlot('{name}', {_json(figure)}.data, {_json(figure)}.layout, {{responsive: true}})</script>"
        for name, figure in figures
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*plan.traffic, f"step times: {cost_model}"))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>Plan for {escape(plan.model)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<h1>{escape(plan.model)} on {escape(plan.device)}, {plan.requests_per_s:.2f} requests/s</h1>"
        f"{_summary(plan)}{charts}<h2>Layouts of the last round</h2>{_table(plan)}"
        f"<h2>Notes</h2><ul class='note'>{notes}</ul></body></html>"
    )


def _json(figure: go.Figure) -> str:
    # "</" would end the script element.
    return str(figure.to_json()).replace("</", "<\\/")


def _summary(plan: Plan) -> str:
    considered = (
        f"<p class='note'>{plan.considered} layouts considered, {plan.possible} within their bounds, "
        f"{plan.simulated} simulations.</p>"
    )
    if plan.chosen is None or plan.costs is None:
        why = "" if plan.miss is None else plan.miss.explanation
        return f"<div class='miss'><p><b>Nothing meets the objectives.</b> {escape(why)}</p></div>{considered}"
    chosen, costs = plan.chosen, plan.costs
    per_million = "" if costs.per_million_tokens is None else f", ${costs.per_million_tokens:.3f} per million tokens"
    busy = "" if costs.per_million_tokens_busy is None else f" (${costs.per_million_tokens_busy:.3f} busy)"
    return (
        f"<div class='plan'><p><b>{escape(str(chosen.layout))}</b>: {plural(chosen.layout.devices, 'device')}, "
        f"${costs.per_hour:.2f} per hour{per_million}{busy}. {chosen.joint:.1%} of requests within their objectives, "
        f"goal {plan.goal.attainment:.0%}.</p><p>{escape(plan.verdict)}.</p></div>{considered}"
    )


def _points(
    name: str, found: Sequence[Evaluation], x: list[float], y: list[float], color: str, size: int
) -> go.Scatter:
    text = [
        f"{each.layout}<br>{plural(each.layout.devices, 'device')}, {each.joint:.1%} within objectives"
        for each in found
    ]
    return go.Scatter(
        x=x, y=y, mode="markers", name=name, text=text, hoverinfo="text+x+y", marker={"color": color, "size": size}
    )


def _kinds(plan: Plan) -> list[tuple[str, list[Evaluation], str, int]]:
    kinds = [
        ("disaggregated", [each for each in plan.finalists if not each.layout.is_aggregated], DISAGGREGATED, 10),
        ("aggregated", [each for each in plan.finalists if each.layout.is_aggregated], AGGREGATED, 10),
    ]
    return [*kinds, ("the plan", [plan.chosen], CHOSEN, 16)] if plan.chosen is not None else kinds


def _goodput_cost(plan: Plan) -> go.Figure:
    figure = go.Figure()
    frontier = plan.frontier()
    price = plan.price_per_hour
    figure.add_scatter(
        x=[each.layout.devices * price for each in frontier],
        y=[each.goodput_per_s for each in frontier],
        mode="lines", name="frontier", line={"color": "#afb8c1", "shape": "hv"},
    )  # fmt: skip
    for name, found, color, size in _kinds(plan):
        x = [each.layout.devices * price for each in found]
        figure.add_trace(_points(name, found, x, [each.goodput_per_s for each in found], color, size))
    figure.update_layout(xaxis_title="$ per hour", yaxis_title="requests/s within objectives", margin={"t": 20})
    return figure


def _ttft_tpot(plan: Plan) -> go.Figure:
    figure = go.Figure()
    for name, found, color, size in _kinds(plan):
        known = [(each, each.tpot_p90_s, each.ttft_p90_s) for each in found]
        shown = [(each, tpot, ttft) for each, tpot, ttft in known if tpot is not None and ttft is not None]
        x, y = [1000 * tpot for _, tpot, _ in shown], [ttft for _, _, ttft in shown]
        figure.add_trace(_points(name, [each for each, _, _ in shown], x, y, color, size))
    if plan.goal.slo.tpot_s is not None:
        figure.add_vline(x=1000 * plan.goal.slo.tpot_s, line_dash="dot", annotation_text="TPOT objective")
    if plan.goal.slo.ttft_s is not None:
        figure.add_hline(y=plan.goal.slo.ttft_s, line_dash="dot")
        # On a logarithmic axis plotly places annotations by the logarithm, lines by the value.
        at = math.log10(plan.goal.slo.ttft_s)
        place = {"x": 0, "xref": "x domain", "xanchor": "left", "y": at, "yshift": 9}
        figure.add_annotation(text="TTFT objective", showarrow=False, **place)
    figure.update_layout(xaxis_title="TPOT, p90 (ms)", yaxis_title="TTFT, p90 (s)", yaxis_type="log", margin={"t": 20})
    return figure


def _variants(plan: Plan) -> go.Figure:
    names = ["the plan", *(each.name for each in plan.variants)]
    found = [plan.chosen, *(each.evaluation for each in plan.variants)]
    shares = [0.0 if each is None else each.joint for each in found]
    colors = [CHOSEN if share >= plan.goal.attainment else "#cf222e" for share in shares]
    figure = go.Figure(go.Bar(x=names, y=[100 * share for share in shares], marker={"color": colors}))
    figure.add_hline(y=100 * plan.goal.attainment, line_dash="dot", annotation_text="goal")
    figure.update_layout(yaxis_title="% of requests within objectives", yaxis_range=[0, 105], margin={"t": 20})
    return figure


def _table(plan: Plan) -> str:
    head = ("layout", "devices", "$ per hour", "within objectives", "goodput/s", "TTFT p90", "TPOT p90", "busy")
    rows = [
        (
            escape(str(each.layout)), str(each.layout.devices), f"{each.layout.devices * plan.price_per_hour:.2f}",
            f"{each.joint:.1%}", f"{each.goodput_per_s:.2f}", _seconds(each.ttft_p90_s), _seconds(each.tpot_p90_s),
            f"{each.busy:.0%}",
        )
        for each in plan.finalists
    ]  # fmt: skip
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
