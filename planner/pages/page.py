"""A self-contained HTML page of tables and interactive charts, with plotly inlined."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #d1d9e0 }
th:first-child, td:first-child, .text { text-align: left }
.plan { border-left: 4px solid #1a7f37; padding: .4rem 1rem; background: #f6f8fa }
.miss { border-left: 4px solid #cf222e; padding: .4rem 1rem; background: #f6f8fa }
.charts { display: grid; grid-template-columns: 1fr 1fr; column-gap: 1rem } .charts > div { min-width: 0 }
.chart { height: 330px } .note { color: #59636e; font-size: .9rem }
@page { size: A4; margin: 12mm }
@media print {
  body { zoom: .63; max-width: none; margin: 0; padding: 0 }
  .chart, table, .plan, .miss { break-inside: avoid } h2 { break-after: avoid; margin-top: 1rem }
}
"""
# Plotly takes 4.8 MB; packed, a report stays below 3 MB.
_DRAW = """
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  for (const chart of document.querySelectorAll(".chart")) {
    const figure = JSON.parse(document.getElementById(chart.id + "-figure").textContent);
    await Plotly.newPlot(chart, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  }
})();
"""


class Chart(NamedTuple):
    """`title`: HTML."""

    name: str
    title: str
    figure: go.Figure


def html_page(title: str, before: str, charts: Sequence[Chart], after: str = "") -> str:
    """It loads nothing from the network. `before` and `after` the charts: HTML."""
    shown = "".join(
        f"<div><h2>{each.title}</h2><div class='chart' id='{each.name}'></div>"
        f"<script type='application/json' id='{each.name}-figure'>{_json(each.figure)}</script></div>"
        for each in charts
    )
    plotly = base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9)).decode()
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"{before}<div class='charts'>{shown}</div>{after}"
        f"<script type='text/plain' id='plotly'>{plotly}</script><script>{_DRAW}</script></body></html>"
    )


def _json(figure: go.Figure) -> str:
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={"t": 40, "r": 20})
    # "</" would end the script element.
    return str(figure.to_json()).replace("</", "<\\/")
