"""Fetches one request's trace from the controller and shows it as a Gantt chart."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli.admin_client import TIMEOUT_S, Admin, controller_at
from cluster.cli.console import UNLIMITED
from tandem.text.words import plural, size, worker_path
from tandem.v1 import trace_pb2

MIN_BAR = 16
FILE_WIDTH = 100  # columns of a chart without a terminal
_BESIDE_BAR = 36  # columns before the bar
_STYLES = {
    "queue": "dim",
    "reserve": "cyan",
    "dispatch": "dim",
    "prefill": "blue",
    "connect": "cyan",
    "pieces": "magenta",
    "verify": "yellow",
    "first_token": "bold green",
    "join": "yellow",
    "decode": "green",
}


async def fetch(admin: Admin, request_id: str) -> trace_pb2.RequestTrace:
    async with controller_at(admin) as stub:
        return await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=request_id), timeout=TIMEOUT_S)


def show(trace: trace_pb2.RequestTrace, console: Console) -> None:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(trace.received_unix_s))
    end = f"{trace.state} ({trace.error})" if trace.error else trace.state
    console.print(f"{trace.request_id}  {trace.model}  {at}  {end}", markup=False)
    console.print(
        f"{trace.prompt_tokens} prompt tokens ({trace.cached_tokens_prefill} cached on prefill, "
        f"{trace.cached_tokens_decode} on decode), {trace.completion_tokens} answered, {_ms(trace.total_s)}"
    )
    if trace.accepted_tokens or trace.unused_tokens:
        console.print(f"proposed tokens: {trace.accepted_tokens} accepted, {trace.unused_tokens} unused")
    width = console.width if console.width < UNLIMITED else FILE_WIDTH
    if not trace.attempts:
        console.print("no worker received it")
    for number, attempt in enumerate(trace.attempts, 1):
        console.print()
        path = worker_path(attempt.prefill_worker, attempt.decode_worker, ", without a handoff")
        console.print(f"attempt {number}: {path}" if len(trace.attempts) > 1 else path, markup=False)
        console.print(gantt(attempt, max(MIN_BAR, width - _BESIDE_BAR)))
        for line in _totals(attempt):
            console.print(line, markup=False)


def _totals(attempt: trace_pb2.Attempt) -> list[str]:
    lines = []
    if attempt.bytes:
        how = f"{plural(attempt.pieces, 'piece')}, {plural(attempt.blocks, 'block')}"
        over = f" over {', '.join(attempt.transports)}" if attempt.transports else ""
        lines.append(f"moved: {size(attempt.bytes)} in {how}{over}")
    elif attempt.HasField("received"):
        lines.append("moved: nothing, the decode worker had all blocks")
    if attempt.HasField("overlap_share"):
        share = 100 * attempt.overlap_share
        lines.append(f"overlap: {share:.0f} % of the bytes had arrived when the last layer was computed")
    if attempt.HasField("exposed_s"):
        lines.append(
            f"from there to the decode batch: {_ms(attempt.exposed_s)}, in parallel with sampling the first token"
        )
    if attempt.error:
        lines.append(f"failed: {attempt.error}{f' ({attempt.cause})' if attempt.cause else ''}: {attempt.message}")
    return lines


def gantt(attempt: trace_pb2.Attempt, width: int) -> Table:
    """One row per span. The axis covers the stages between queue and decode; ◂ or ▸ marks a span that is cut off."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("from ms", justify="right", no_wrap=True)
    table.add_column("took ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=width)
    start_s, end_s = _axis(attempt)
    for span in attempt.spans:
        table.add_row(
            span.stage.replace("_", " "),
            f"{1000 * span.start_s:.1f}",
            f"{1000 * (span.end_s - span.start_s):.2f}",
            _bar(span, start_s, end_s, width),
        )
    return table


def _axis(attempt: trace_pb2.Attempt) -> tuple[float, float]:
    """Start and end of the axis in seconds; never empty."""
    inner = [span for span in attempt.spans if span.stage not in ("queue", "decode")] or list(attempt.spans)
    start_s = min((span.start_s for span in inner), default=0.0)
    end_s = max((span.end_s for span in inner), default=0.0)
    margin_s = max(1e-6, 0.05 * (end_s - start_s))
    return max(0.0, start_s - margin_s), end_s + margin_s


def _bar(span: trace_pb2.Span, start_s: float, end_s: float, width: int) -> Text:
    def column(at_s: float) -> int:
        return min(width - 1, max(0, int((at_s - start_s) / (end_s - start_s) * width)))

    first, last = column(span.start_s), column(span.end_s)
    bar = "█" * (last - first) + ("◆" if span.stage == "first_token" else "█")
    if span.start_s < start_s:
        bar = "◂" + bar[1:]
    if span.end_s > end_s:
        bar = bar[:-1] + "▸"
    return Text(" " * first + bar, style=_STYLES.get(span.stage, ""))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
