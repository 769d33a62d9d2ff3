"""The first page of `tandem top`, drawn for a width and a height. `tandem top --once` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli.console import fitted, style_of
from cluster.cli.top.frame import RouterAnswer, TopFrame
from cluster.cli.top.tables import FLOWS, REQUESTS, WORKERS, Column, Item, number, seconds
from router.dashboard.snapshot import LatencyPercentiles, QueueRow, WorkerRow
from tandem.text.words import size

NARROW = 100  # columns; narrower terminals get shorter bars
_WORKERS = ("worker", "role", "state", "health", "running", "waiting", "reserved", "pace")
# Columns that a narrow terminal drops, in this order.
_SPARE_ROUTERS = ("TTFT, 5 min", "ITL p50/p99", "tok/s", "TTFT p50/p99", "req/s", "running")
_SPARE_WORKERS = ("reserved", "pace", "health", "waiting", "KV blocks", "running", "role")
_SPARE_FLOWS = (
    "link B/s", "latency", "transport", "failed", "moved", "handoffs", "handoffs/s", "in flight", "state", "KV/s",
)  # fmt: skip
_SPARE_REQUESTS = ("received", "cached", "KV", "path", "total", "TTFT", "prompt", "output", "state")
_BARS = " ▁▂▃▄▅▆▇█"


def overview(frame: TopFrame, width: int, height: int) -> RenderableType:
    """Cuts what does not fit from the end; routers, queues and workers come first."""
    left = height - 4 - len(frame.routers) - len(frame.queues)
    workers = frame.workers[: max(3, left - 4)]
    left -= len(workers) + 2
    flows = sorted(frame.flows, key=lambda flow: -flow.bytes_per_s)[: max(0, min(8, left // 2))]
    left -= len(flows) + 2 if flows else 0
    parts: list[RenderableType] = [headline(frame), _routers(frame.routers, width)]
    if frame.queues:
        parts.append(_queues(frame.queues))
    parts += [Text(), _workers(workers, width)]
    if len(workers) < len(frame.workers):
        parts.append(Text(f"… and {len(frame.workers) - len(workers)} more workers", style="dim"))
    if flows:
        parts += [Text(), _plain(flows, FLOWS, _SPARE_FLOWS, width)]
    if left > 3 and frame.requests:
        requests = frame.requests[: left - 2]
        parts += [Text(), _plain(requests, REQUESTS, _SPARE_REQUESTS, width)]
    return Group(*parts)


def headline(frame: TopFrame) -> Text:
    ready = sum(worker.state == "ready" for worker in frame.workers)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(frame.cluster, "bold")
    text.append(f" {frame.version}   ", "dim")
    text.append(f"{ready} of {len(frame.workers)} workers ready", "green" if ready == len(frame.workers) else "yellow")
    text.append(f"   {size(sum(flow.bytes_per_s for flow in frame.flows))}/s KV", "magenta")
    text.append(f"   redis {frame.redis}", "red" if frame.redis == "unreachable" else "dim")
    return text


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values, scaled so that the highest is a full block; None is a space."""
    shown = list(values)[-width:]
    top = max((value for value in shown if value is not None), default=0.0)
    return "".join(
        " " if value is None or not top else _BARS[max(1, round(value / top * (len(_BARS) - 1)))] for value in shown
    )


def block_bar(worker: WorkerRow, width: int) -> Text:
    """A bar of the blocks in use, leased, cached and free, in this order."""
    blocks = worker.blocks
    if not blocks.total:
        return Text("–", style="dim")
    bar, drawn = Text(), 0
    parts = ((blocks.in_use, "█", "green"), (blocks.leased, "█", "magenta"), (blocks.cached, "▒", "blue"))
    cumulative = 0
    for count, sign, style in parts:
        cumulative += count
        cells = round(cumulative / blocks.total * width) - drawn
        bar.append(sign * cells, style)
        drawn += cells
    bar.append("·" * (width - drawn), "dim")
    return bar


def _routers(routers: Sequence[RouterAnswer], width: int) -> Table:
    titles = ("router", "queued", "running", "req/s", "tok/s", "TTFT p50/p99", "ITL p50/p99", "TTFT, 5 min")
    rows: list[list[RenderableType]] = []
    for row in routers:
        name = Text(row.router_id, style=style_of(row.state))
        if row.state != "ready":
            name.append(f" {row.state.replace('_', ' ')}")
        if row.restarts:
            name.append(f" ({row.restarts} restarts)", "yellow")
        if row.view is None:
            rows.append([name, *[""] * (len(titles) - 1)])
            continue
        view = row.view
        rows.append([
            name,
            str(view.queued_requests),
            str(view.running_requests),
            number(view.rates.requests_per_s),
            number(view.rates.output_tokens_per_s),
            _pair(view.latency[0].ttft),
            _pair(view.latency[0].itl),
            Text(sparkline(view.history.ttft.p50, 30), style="cyan"),
        ])  # fmt: skip
    return fitted(width, titles, rows, left=(titles[0], titles[-1]), spare=_SPARE_ROUTERS, header_style="dim")


def _pair(found: LatencyPercentiles) -> str:
    return "–" if found.p50 is None else f"{seconds(found.p50)} / {seconds(found.p99)}"


def _queues(queues: Sequence[QueueRow]) -> Text:
    parts = [
        f"{queue.name} {queue.queued} waiting" + (f", {number(refused)} refused" if refused else "")
        for queue in queues
        for refused in [sum(queue.refusals.values())]
    ]
    return Text("queues: " + "   ".join(parts), no_wrap=True, overflow="ellipsis")


def _workers(workers: Sequence[WorkerRow], width: int) -> Table:
    columns = [column for column in WORKERS if column.title in _WORKERS]
    bar = max(8, min(40, width - 62 if width < NARROW else width - 86))
    rows = [[*(cell(column, worker) for column in columns), block_bar(worker, bar)] for worker in workers]
    left = [column.title for column in columns if column.justify == "left"]
    titles = [column.title for column in columns]
    return fitted(
        width, [*titles, "KV blocks"], rows, left=[*left, "KV blocks"], spare=_SPARE_WORKERS, header_style="dim"
    )


def _plain(items: Sequence[Item], columns: Sequence[Column[Item]], spare: Sequence[str], width: int) -> Table:
    rows = [[cell(column, item) for column in columns] for item in items]
    left = [column.title for column in columns if column.justify == "left"]
    return fitted(width, [column.title for column in columns], rows, left=left, spare=spare, header_style="dim")


def cell(column: Column[Item], item: Item) -> Text:
    text = column.text(item)
    style = style_of(text.replace(" ", "_")) if column.title in ("state", "health") else ""
    return Text(text, style=style, justify=column.justify)
