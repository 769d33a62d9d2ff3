"""A plan as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

import plotly.graph_objects as go

from planner.pages.page import Chart, html_page
from planner.search.costs import COST_TITLES, money
from planner.search.evaluate import Evaluation
from planner.search.plan import Plan
from planner.search.roofline import RooflineChart
from planner.search.schedule import Schedule
from planner.search.trials import RESAMPLES
from tandem.config.model import Role
from tandem.text.words import plural, seconds
from tandem.version import tandem_version

DISAGGREGATED, AGGREGATED, CHOSEN = "#1f6feb", "#d29922", "#1a7f37"
_MISSED = "the goal is missed"
_LEGEND = (
    "3xTP2 : 1xTP4 @2048: three prefill workers of two devices, one decode worker of four, 2,048 tokens in a step",
    "goodput: requests per second within both objectives; busy: the share of time in which devices run steps",
    "deployed: devices of whole machines, and their price per hour",
    "grey bars: from the second worst to the second best of the resampled traces",
    "MFU, MBU: shares of a device's peaks that a step reaches, all-reduces and overheads included; decode with up to "
    "as many requests as a worker runs; FLOPs as of 16 bits",
)


def html_report(plan: Plan, cost_model: str, more: Sequence[str] = (), rooflines: Sequence[RooflineChart] = ()) -> str:
    """The page loads nothing from the network. `more`: notes on the deployment and on other devices. `rooflines`: one,
    or of each role's device."""
    figures = [("goodput-cost", _goodput_cost(plan)), ("ttft-tpot", _ttft_tpot(plan))]
    if plan.variants:
        figures.append(("variants", _variants(plan)))
    if plan.schedule is not None:
        figures.append(("schedule", _schedule(plan, plan.schedule)))
    if plan.grid:
        figures.append(("grid", _grid(plan)))
    figures += [(name, _roofline(each)) for name, each in zip(("roofline", "roofline-decode"), rooflines, strict=False)]
    titles = {
        "goodput-cost": "Goodput against cost",
        "ttft-tpot": "TTFT against TPOT",
        "variants": "The plan under other conditions",
        "schedule": "The plan's pools over time",
        "grid": "Other numbers of workers",
        "roofline": "What a device does in a step",
    }
    if len(rooflines) > 1:
        for name, role in (("roofline", Role.PREFILL), ("roofline-decode", Role.DECODE)):
            titles[name] = f"What a device does in a step: {role} on {escape(plan.machines.of_role(role).device)}"
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*_LEGEND, *more))
    return html_page(
        f"Plan for {plan.model}",
        f"<h1>{escape(plan.model)} on {escape(plan.device)}, {plan.requests_per_s:.2f} requests/s</h1>"
        f"{_summary(plan)}{_assumptions(plan, cost_model)}",
        [Chart(name, titles[name], figure) for name, figure in figures],
        f"<h2>Layouts simulated to their end</h2>{_table(plan)}<h2>Notes</h2><ul class='note'>{notes}</ul>",
    )


def _assumptions(plan: Plan, cost_model: str) -> str:
    """What was asked for, and of what traffic and hardware."""
    goal, slo = plan.goal, plan.goal.slo
    traffic, *notes = plan.traffic
    objectives = [
        f"TTFT {slo.ttft_s:g} s" if slo.ttft_s else "no TTFT",
        f"TPOT {slo.tpot_s:g} s" if slo.tpot_s else "no TPOT",
    ]
    for name, own in slo.of_class:
        limits = (("TTFT", own.ttft_s), ("TPOT", own.tpot_s))
        objectives.append(f"class {name}: " + " and ".join(f"{each} {s:g} s" for each, s in limits if s is not None))
    if (longest_s := goal.longest_step_s) is not None:
        objectives.append(f"steps with prompts and answers of up to {longest_s:g} s")
    others = f", and for {100 * goal.confidence:g} % of the resampled traces" if goal.confidence else ""
    rows = (
        ("traffic", "; ".join((traffic, *notes))),
        ("objectives", f"{', '.join(objectives)}, for {100 * goal.attainment:g} % of the requests{others}"),
        ("devices", f"up to {goal.max_devices} x {plan.device}, {plan.machines.prices}"),
        ("step times", cost_model),
        ("made by", f"tandem {tandem_version()}, {datetime.now(UTC):%Y-%m-%d}"),
    )
    cells = "".join(f"<tr><td>{name}</td><td class='text'>{escape(text)}</td></tr>" for name, text in rows)
    return f"<h2>Assumptions</h2><table>{cells}</table>"


def _summary(plan: Plan) -> str:
    considered = (
        f"<p class='note'>{plan.considered} layouts considered, {plan.possible} within their bounds, "
        f"{plan.simulated} simulations.</p>"
    )
    if plan.chosen is not None and plan.chosen.of_class:
        considered += f"<p class='note'>{escape(plan.chosen.class_line)}.</p>"
    if plan.chosen is None:
        why = "" if plan.miss is None else plan.miss.explanation
        return f"<div class='miss'><p><b>Nothing meets the goal.</b> {escape(why)}</p></div>{considered}"
    chosen = plan.chosen
    rows = "".join(
        f"<tr><td>{escape(each.what)}</td><td>{each.devices}</td><td>${each.per_hour:.2f}</td>"
        f"<td>{money(each.per_million_tokens)}</td><td>{money(each.per_million_output_tokens)}</td></tr>"
        for each in plan.costs
    )
    titles = "".join(f"<th>{title}</th>" for title in COST_TITLES)
    note, sized = plan.same_price_note(), [] if plan.schedule is None else [*plan.schedule.lines()]
    lines = (*([] if note is None else [note]), *plan.headroom_lines(), *sized)
    beside = "".join(f"<p>{escape(each)}.</p>" for each in lines)
    sure = "".join(
        f"<tr><td>{escape(str(each.layout))}</td><td>{each.layout.devices}</td><td>{each.met} of {RESAMPLES}</td>"
        f"<td>{each.low:.1%} to {each.high:.1%}</td></tr>"
        for each in plan.resampled
    )
    return (
        f"<div class='plan'><p><b>{escape(str(chosen.layout))}</b>: {plural(chosen.layout.devices, 'device')}, "
        f"{chosen.joint:.1%} of requests within their objectives, goal {100 * plan.goal.attainment:g} %.</p>"
        f"{beside}<p>{escape(plan.verdict)}.</p><table><tr>{titles}</tr>{rows}</table>"
        f"<table><tr><th>with {RESAMPLES} resampled traces</th><th>devices</th><th>meets the goal</th>"
        f"<th>requests within objectives</th></tr>{sure}</table></div>{considered}"
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
    figure.add_scatter(
        x=[plan.per_hour(each.layout) for each in frontier],
        y=[each.goodput_per_s for each in frontier],
        mode="lines", name="frontier", line={"color": "#afb8c1", "shape": "hv"},
    )  # fmt: skip
    for name, found, color, size in _kinds(plan):
        x = [plan.per_hour(each.layout) for each in found]
        figure.add_trace(_points(name, found, x, [each.goodput_per_s for each in found], color, size))
    figure.update_layout(xaxis_title="$ per hour", yaxis_title="requests/s within objectives")
    return figure


def _ttft_tpot(plan: Plan) -> go.Figure:
    figure = go.Figure()
    for name, found, color, size in _kinds(plan):
        known = [(each, each.tpot_p90_s, each.ttft_p90_s) for each in found]
        shown = [(each, tpot, ttft) for each, tpot, ttft in known if tpot is not None and ttft is not None]
        x, y = [1000 * tpot for _, tpot, _ in shown], [ttft for _, _, ttft in shown]
        figure.add_trace(_points(name, [each for each, _, _ in shown], x, y, color, size))
    if plan.goal.slo.tpot_s is not None:
        figure.add_vline(
            x=1000 * plan.goal.slo.tpot_s,
            line_dash="dot",
            annotation_text="TPOT objective",
            annotation_position="top left",
        )
    if plan.goal.slo.ttft_s is not None:
        figure.add_hline(y=plan.goal.slo.ttft_s, line_dash="dot")
        # On a logarithmic axis plotly places annotations by the logarithm, lines by the value.
        at = math.log10(plan.goal.slo.ttft_s)
        place = {"x": 0, "xref": "x domain", "xanchor": "left", "y": at, "yshift": 9}
        figure.add_annotation(text="TTFT objective", showarrow=False, **place)
    figure.update_layout(xaxis_title="TPOT, p90 (ms)", yaxis_title="TTFT, p90 (s)", yaxis_type="log")
    return figure


def _variants(plan: Plan) -> go.Figure:
    """The bars of the plan and of the best cheaper layout reach over 20 resampled traces."""
    assert plan.chosen is not None
    by_layout = {each.layout: each for each in plan.finalists}
    names = [f"cheaper: {each.layout}" if each.layout != plan.chosen.layout else "the plan" for each in plan.resampled]
    found: list[Evaluation | None] = [by_layout[each.layout] for each in plan.resampled]
    bands = [(each.low, each.high) for each in plan.resampled]
    names += [each.name for each in plan.variants]
    found += [each.evaluation for each in plan.variants]
    shares = [0.0 if each is None else each.joint for each in found]
    error = {
        "type": "data", "symmetric": False, "color": "#57606a",
        "array": [100 * max(0.0, high - share) for share, (_, high) in zip(shares, bands, strict=False)],
        "arrayminus": [100 * max(0.0, share - low) for share, (low, _) in zip(shares, bands, strict=False)],
    }  # fmt: skip
    colors = [CHOSEN if share >= plan.goal.attainment else "#cf222e" for share in shares]
    figure = go.Figure(go.Bar(x=names, y=[100 * share for share in shares], marker={"color": colors}, error_y=error))
    figure.add_hline(y=100 * plan.goal.attainment, line_dash="dot", annotation_text="goal")
    figure.update_layout(yaxis_title="% of requests within objectives", yaxis_range=[0, 105])
    figure.update_xaxes(automargin=True)
    return figure


def _schedule(plan: Plan, found: Schedule) -> go.Figure:
    """Devices of whole machines as steps, and the rate of requests on an axis of its own."""
    figure, hours = go.Figure(), [each.start_s / 3600 for each in found.parts]
    hours.append(found.parts[-1].end_s / 3600)
    deployed = [plan.deployed(each.layout) for each in found.parts]
    devices = [each.devices for each in deployed]
    text = [
        "<br>".join(
            [str(each.layout), f"deployed: {on}", f"{each.requests_per_s:.2f} requests/s"]
            + ([] if each.meets else [_MISSED])
        )
        for each, on in zip(found.parts, deployed, strict=True)
    ]
    figure.add_scatter(
        x=hours, y=[*devices, devices[-1]], mode="lines", name="devices", text=[*text, text[-1]], hoverinfo="text",
        line={"color": CHOSEN, "shape": "hv"},
    )  # fmt: skip
    rates = [each.requests_per_s for each in found.parts]
    figure.add_scatter(
        x=hours, y=[*rates, rates[-1]], mode="lines", name="requests/s", yaxis="y2", hoverinfo="skip",
        line={"color": "#afb8c1", "shape": "hv"},
    )  # fmt: skip
    if missed := [at for at, each in enumerate(found.parts) if not each.meets]:
        figure.add_scatter(
            x=[hours[at] for at in missed], y=[devices[at] for at in missed], mode="markers", name=_MISSED,
            hoverinfo="skip", marker={"color": "#cf222e", "symbol": "x", "size": 9},
        )  # fmt: skip
    figure.add_hline(
        y=found.fixed_devices, line_dash="dot", annotation_text="the plan", annotation_position="bottom right"
    )
    figure.update_xaxes(title="hours since the first request")
    figure.update_layout(
        yaxis={"title": "devices", "rangemode": "tozero"},
        yaxis2={"title": "requests/s", "overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False},
    )
    return figure


def _grid(plan: Plan) -> go.Figure:
    """The share of requests within their objectives, by workers of each role; a cell is empty beyond the devices."""
    assert plan.chosen is not None
    found = {(each.layout.prefill_workers, each.layout.decode_workers): each for each in plan.grid}
    rows, columns = (sorted({place[axis] for place in found}) for axis in (0, 1))
    cells = [[found.get((row, column)) for column in columns] for row in rows]
    shares = [[None if each is None else 100 * each.joint for each in row] for row in cells]
    text = [["" if each is None else f"{100 * each.joint:.0f}" for each in row] for row in cells]
    hover = [
        ["" if each is None else f"{each.layout}, {plural(each.layout.devices, 'device')}" for each in row]
        for row in cells
    ]
    layout, labels = plan.chosen.layout, [str(row) if row else "none" for row in rows]
    figure = go.Figure(
        go.Heatmap(
            x=[str(column) for column in columns], y=labels, z=shares, text=text, texttemplate="%{text}",
            hovertext=hover, hoverinfo="text", colorscale="RdYlGn", zmin=0, zmax=100, showscale=False, xgap=2, ygap=2,
        )
    )  # fmt: skip
    figure.add_scatter(
        x=[str(layout.decode_workers)], y=[labels[rows.index(layout.prefill_workers)]], mode="markers", name="the plan",
        marker={"color": "rgba(0,0,0,0)", "size": 34, "symbol": "square", "line": {"color": "#1f2328", "width": 2}},
    )  # fmt: skip
    widths = {each.layout.prefill_tp for each in plan.grid if not each.layout.is_aggregated}
    figure.update_xaxes(title=f"decode workers (TP{layout.decode_tp})", type="category")
    figure.update_yaxes(title=f"prefill workers (TP{max(widths, default=1)})", type="category")
    return figure


def _roofline(found: RooflineChart) -> go.Figure:
    """Both axes are logarithmic: memory's bound is a slope, arithmetic's is flat, and they meet at the ridge."""
    figure, peak, bandwidth, ridge = go.Figure(), found.flops_per_s / 1e12, found.memory_bytes_per_s / 1e12, found.ridge
    intensities = [each.intensity for each in found.points]
    ends = (min(*intensities, ridge) / 2, 2 * max(*intensities, ridge))
    for name, mfu, mbu, dash in (("peaks", 1.0, 1.0, "solid"), ("kernels", found.mfu, found.mbu, "dot")):
        x = [ends[0], ridge * mfu / mbu, ends[1]]
        y = [min(mfu * peak, mbu * bandwidth * each) for each in x]
        figure.add_scatter(x=x, y=y, mode="lines", name=name, line={"color": "#afb8c1", "dash": dash}, hoverinfo="skip")
    for phase, color in (("prefill", DISAGGREGATED), ("decode", AGGREGATED)):
        points = [each for each in found.points if each.phase == phase]
        text = [f"{phase}, {e.what}<br>MFU {e.mfu:.1%}, MBU {e.mbu:.1%}" for e in points]
        figure.add_scatter(
            x=[each.intensity for each in points], y=[each.flops_per_s / 1e12 for each in points],
            mode="markers", name=phase, text=text, hoverinfo="text+x+y", marker={"color": color, "size": 10},
        )  # fmt: skip
    figure.add_vline(x=ridge, line_dash="dot")
    place = {"x": math.log10(ridge), "xanchor": "left", "y": 0, "yref": "y domain", "yanchor": "bottom"}  # as above
    figure.add_annotation(text="ridge", showarrow=False, **place)
    figure.update_xaxes(title="FLOPs for each byte of weights and KV", type="log")
    figure.update_yaxes(title="TFLOP/s of a device", type="log")
    return figure


def _table(plan: Plan) -> str:
    head = (
        "layout", "devices", "$ per hour", "deployed", "within objectives", "goodput/s", "TTFT p90", "TPOT p90", "busy"
    )  # fmt: skip
    rows = [
        (
            escape(str(each.layout)), str(each.layout.devices), f"{plan.per_hour(each.layout):.2f}",
            str(plan.deployed(each.layout)), f"{each.joint:.1%}", f"{each.goodput_per_s:.2f}",
            seconds(each.ttft_p90_s), seconds(each.tpot_p90_s), f"{each.busy:.0%}",
        )
        for each in plan.finalists
    ]  # fmt: skip
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>"
