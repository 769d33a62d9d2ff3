"""The terminal application of `tandem top`. The modules frame, tables and overview compute what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from cluster.cli.top.frame import TopFrame
from cluster.cli.top.overview import cell, overview
from cluster.cli.top.request_screen import RequestScreen, TraceSource
from cluster.cli.top.tables import EVENTS, FLOWS, REQUESTS, WORKERS, Column, Item, Order, arranged
from tandem.errors import TandemError

MIN_INTERVAL_S = 0.2
STATUS_S = 1.0  # between two updates of the status line
NO_ANSWER_S = 2.0  # a fetch that takes so long is shown there


class Source(TraceSource, Protocol):
    @property
    def address(self) -> str: ...

    async def frame(self) -> TopFrame:
        """Raises TandemError."""
        ...


class Page(Generic[Item]):
    """One table with its columns and its current order."""

    def __init__(self, name: str, columns: Sequence[Column[Item]]) -> None:
        self.name = name
        self.columns = columns
        self.order = Order()
        self.items: Sequence[Item] = ()
        self.table: DataTable[Text] = DataTable(id=name, cursor_type="row", zebra_stripes=True)

    def show(self, filter_text: str) -> None:
        """Redraws the table; cursor and scroll position stay."""
        table = self.table
        row, scroll_x, scroll_y = table.cursor_row, table.scroll_x, table.scroll_y
        table.clear(columns=True)
        for number, column in enumerate(self.columns):
            arrow = "" if number != self.order.column else " ▼" if self.order.descending else " ▲"
            table.add_column(Text(column.title + arrow, justify=column.justify))
        for item in arranged(self.items, self.columns, filter_text, self.order):
            table.add_row(*(cell(column, item) for column in self.columns))
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1), animate=False, scroll=False)
        table.scroll_to(scroll_x, scroll_y, animate=False)


class TopApp(App[None]):
    """Shows `first` immediately, then a new frame from `source` every `interval_s`, one fetch at a time."""

    TITLE = "tandem top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = ""  # a focused filter would receive the key presses
    CSS = """
    #status { height: 1; padding: 0 1; background: $panel; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    #overview { padding: 0 1; height: auto; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; padding: 0; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p,space", "pause", "pause"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        *(Binding(str(number), f"page({number})", show=False) for number in range(1, 6)),
        Binding("escape", "leave", show=False),
    ]

    def __init__(self, source: Source, first: TopFrame, interval_s: float = 1.0) -> None:
        super().__init__()
        self.paused = False
        self.frame = first
        self._source = source
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._error = ""
        self._fetching_since_s: float | None = None  # None: no fetch runs
        # Kept as attributes: a query finds only widgets of the top screen.
        self._status = Static(id="status")
        self._filter = Input(placeholder="words that rows must contain; Esc clears", id="filter", compact=True)
        self._overview = Static(id="overview")
        self._tabs = TabbedContent(initial="overview-page")
        self._pages: dict[str, Page[Any]] = {
            page.name: page
            for page in (
                Page("workers", WORKERS), Page("links", FLOWS), Page("requests", REQUESTS), Page("events", EVENTS)
            )
        }  # fmt: skip

    def compose(self) -> ComposeResult:
        yield self._status
        yield self._filter
        with self._tabs:
            with TabPane("1 Overview", id="overview-page"), VerticalScroll():
                yield self._overview
            for number, page in enumerate(self._pages.values(), 2):
                with TabPane(f"{number} {page.name.capitalize()}", id=f"{page.name}-page"):
                    yield page.table
        yield Footer()

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(self._interval_s, self._refresh)
        self.set_interval(STATUS_S, self._draw_status)

    @on(Resize)
    def _resized(self) -> None:
        self._draw()

    # ---- frames

    def _refresh(self) -> None:
        if not self.paused and self._fetching_since_s is None:
            self._fetching_since_s = time.monotonic()
            self._fetch()

    @work(group="frame", exit_on_error=True)
    async def _fetch(self) -> None:
        try:
            self.frame = await self._source.frame()
            self._error = ""
        except TandemError as error:
            self._error = error.message
        finally:
            self._fetching_since_s = None
        if not self.paused:
            self._draw()

    def _draw(self) -> None:
        frame = self.frame
        items: dict[str, Sequence[Any]] = {
            "workers": frame.workers, "links": frame.flows, "requests": frame.requests, "events": frame.events
        }  # fmt: skip
        for name, found in items.items():
            self._pages[name].items = found
        self._draw_status()
        size = self.size
        self._overview.update(overview(frame, max(40, size.width - 2), size.height - 4))
        if (page := self._page) is not None:
            page.show(self._filter.value)

    def _draw_status(self) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        waited_s = 0.0 if self._fetching_since_s is None else time.monotonic() - self._fetching_since_s
        if self._error:
            text.append(f"disconnected: {self._error}", "bold red")
        elif self.paused:
            text.append("paused", "bold yellow")
        elif waited_s >= NO_ANSWER_S:
            text.append(f"no answer for {waited_s:.0f} s", "bold yellow")
        else:
            text.append("live", "bold green")
        text.append(f"   {self._source.address}", "dim")
        if filter_text := self._filter.value:
            text.append(f"   filter: {filter_text}", "yellow")
        if (page := self._page) is not None and page.order.column is not None:
            text.append(f"   sorted by {page.columns[page.order.column].title}", "dim")
        self._status.update(text)

    # ---- pages

    @property
    def _page(self) -> Page[Any] | None:
        """The current table page; None for the overview."""
        return self._pages.get(self._tabs.active.removesuffix("-page"))

    @on(TabbedContent.TabActivated)
    def _page_changed(self) -> None:
        self._draw()
        if (page := self._page) is not None and not self._filter.has_focus:
            page.table.focus()

    @on(Input.Changed, "#filter")
    def _filter_changed(self) -> None:
        self._draw()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        if (page := self._page) is not None:
            page.table.focus()

    @on(DataTable.RowSelected, "#requests")
    def _request_selected(self, event: DataTable.RowSelected) -> None:
        row = self._pages["requests"].table.get_row_at(event.cursor_row)
        self.push_screen(RequestScreen(self._source, str(row[0])))

    # ---- keys

    def action_page(self, number: int) -> None:
        names = ["overview", *self._pages]
        self._tabs.active = f"{names[number - 1]}-page"

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw_status()

    def action_filter(self) -> None:
        if self._page is None:
            self.action_page(4)
        self._filter.add_class("open")
        self._filter.focus()

    def action_leave(self) -> None:
        self._filter.value = ""
        self._filter.remove_class("open")
        self._filter_done()

    def action_sort(self) -> None:
        self._reorder(lambda page: page.order.next(len(page.columns)))

    def action_reverse(self) -> None:
        self._reorder(lambda page: page.order.reversed())

    def _reorder(self, order: Callable[[Page[Any]], Order]) -> None:
        if (page := self._page) is not None:
            page.order = order(page)
            self._draw()
