"""The tables of `tandem top`: columns, filter and order. The items are those of router.dashboard.snapshot. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar

from router.dashboard.snapshot import EventRow, FlowRow, RequestRow, WorkerRow
from tandem.text.words import size, worker_name, worker_path

Item = TypeVar("Item")
Key = str | float


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """`order`: the sort key; None sorts last."""

    title: str
    text: Callable[[Item], str]
    order: Callable[[Item], Key | None]
    justify: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class Order:
    """`column` None: unsorted."""

    column: int | None = None
    descending: bool = True

    def next(self, columns: int) -> Order:
        """Sorts by the next column; after the last, unsorted."""
        following = 0 if self.column is None else self.column + 1
        return Order(following if following < columns else None, self.descending)

    def reversed(self) -> Order:
        return Order(self.column, not self.descending)


def arranged(items: Sequence[Item], columns: Sequence[Column[Item]], filter_text: str, order: Order) -> list[Item]:
    """The items whose row contains every word of `filter_text`, sorted by `order`."""
    words = filter_text.lower().split()
    rows = [(item, " ".join(column.text(item) for column in columns).lower()) for item in items] if words else []
    found = [item for item, text in rows if all(word in text for word in words)] if words else list(items)
    if order.column is None:
        return found
    key = columns[order.column].order
    known = [(value, item) for item in found if (value := key(item)) is not None]
    known.sort(key=itemgetter(0), reverse=order.descending)
    return [*(item for _, item in known), *(item for item in found if key(item) is None)]


# --- formats of figures -----------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 0.001:
        return f"{1e6 * value:.0f} µs"
    if value < 1:
        return f"{1000 * value:.{0 if value >= 0.1 else 1}f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value / 60:.0f} min"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def path_of(request: RequestRow) -> str:
    if not request.decode_worker:
        return "–"
    path = worker_path(request.prefill_worker, request.decode_worker)
    return f"{path} ({request.attempts} attempts)" if request.attempts > 1 else path


def clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


# --- columns ----------------------------------------------------------------------------------------------------


def _text(title: str, value: Callable[[Any], str]) -> Column[Any]:
    return Column(title, value, value, "left")


def _figure(title: str, value: Callable[[Any], float | None], write: Callable[[float | None], str]) -> Column[Any]:
    return Column(title, lambda item: write(value(item)), value)


def _busy(worker: WorkerRow) -> float:
    blocks = worker.blocks
    return (blocks.in_use + blocks.leased) / blocks.total if blocks.total else 0.0


def _pace(worker: WorkerRow) -> str:
    if worker.prefill_tokens_per_s is not None:
        return f"{number(worker.prefill_tokens_per_s)} tok/s"
    return "–" if worker.tpot_s is None else f"{seconds(worker.tpot_s)}/tok"


WORKERS: tuple[Column[WorkerRow], ...] = (
    _text("worker", lambda worker: worker.worker_id),
    _text("role", lambda worker: worker.role),
    _text("state", lambda worker: worker.state.replace("_", " ")),
    _text("health", lambda worker: worker.health or "–"),
    _figure("running", lambda worker: worker.running_requests, number),
    _figure("waiting", lambda worker: worker.waiting_requests, number),
    _figure("reserved", lambda worker: worker.reserved_requests, number),
    _figure("blocks busy", _busy, lambda value: share(value or 0.0, 1.0)),
    _figure("cached", lambda worker: worker.blocks.cached, number),
    _figure("total", lambda worker: worker.blocks.total, number),
    Column("pace", _pace, lambda worker: worker.prefill_tokens_per_s or worker.tpot_s),
    _figure("tp", lambda worker: worker.tp, number),
    _figure("restarts", lambda worker: worker.restarts, number),
    _text("model", lambda worker: worker.model),
    _text("reason", lambda worker: worker.reason),
)

FLOWS: tuple[Column[FlowRow], ...] = (
    _text("prefill", lambda flow: worker_name(flow.prefill_worker, "prefill")),
    _text("decode", lambda flow: worker_name(flow.decode_worker, "decode")),
    _figure("KV/s", lambda flow: flow.bytes_per_s, size),
    _figure("handoffs/s", lambda flow: flow.handoffs_per_s, lambda value: f"{value or 0:.1f}"),
    _figure("in flight", lambda flow: flow.in_flight, number),
    _figure("handoffs", lambda flow: flow.handoffs, number),
    _figure("moved", lambda flow: flow.bytes, size),
    _figure("failed", lambda flow: flow.failures, number),
    _text("state", lambda flow: flow.state or "–"),
    _text("transport", lambda flow: flow.transport or "–"),
    _figure("latency", lambda flow: flow.latency_s, seconds),
    _figure("link B/s", lambda flow: flow.link_bytes_per_s, size),
)

REQUESTS: tuple[Column[RequestRow], ...] = (
    _text("request", lambda request: request.request_id),
    _text("state", lambda request: (request.error or request.state).replace("_", " ")),
    _text("path", path_of),
    Column("received", lambda request: clock(request.received_unix_s), lambda request: request.received_unix_s),
    _figure("prompt", lambda request: request.prompt_tokens, number),
    _figure("cached", lambda request: request.cached_tokens, number),
    _figure("output", lambda request: request.completion_tokens, number),
    _figure("TTFT", lambda request: request.ttft_s, seconds),
    _figure("total", lambda request: request.total_s, seconds),
    _figure("KV", lambda request: request.handoff_bytes, lambda value: size(value) if value else "–"),
)

EVENTS: tuple[Column[EventRow], ...] = (
    Column("at", lambda event: clock(event.last_unix_s), lambda event: event.last_unix_s),
    _text("event", lambda event: event.kind.replace("_", " ")),
    _text("subject", lambda event: event.subject),
    _text("", lambda event: f"{event.text}{f' ×{event.times}' if event.times > 1 else ''}"),
)
