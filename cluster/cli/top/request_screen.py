"""The screen of `tandem top` with one request's timeline."""

from __future__ import annotations

import io
from typing import ClassVar, Protocol

from rich.console import Console, RenderableType
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from cluster.cli.request_trace import show
from tandem.errors import NotFound, TandemError
from tandem.v1 import trace_pb2

POLL_S = 1.0
_MARGIN = 8


class TraceSource(Protocol):
    async def trace(self, request_id: str) -> trace_pb2.RequestTrace:
        """Raises NotFound until the request has ended, and TandemError."""
        ...


class RequestScreen(ModalScreen[None]):
    """Polls until the request has ended, then shows its timeline."""

    CSS = """
    RequestScreen { align: center middle; }
    #panel { width: 94%; height: 90%; border: round $primary; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "close")]

    def __init__(self, source: TraceSource, request_id: str) -> None:
        super().__init__()
        self._source = source
        self._request_id = request_id

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="panel") as panel:
            panel.border_title = self._request_id
            yield Static("loading…", id="timeline")
        yield Footer()

    def on_mount(self) -> None:
        self._load()

    @work(exclusive=True)
    async def _load(self) -> None:
        text: RenderableType
        try:
            trace = await self._source.trace(self._request_id)
            console = Console(width=max(60, int(self.app.size.width * 0.94) - _MARGIN), record=True, file=io.StringIO())
            show(trace, console)
            text = Text.from_ansi(console.export_text(styles=True))
        except NotFound:
            text = Text(
                "still running, or no longer kept: the timeline appears when the request has ended", style="yellow"
            )
            self.set_timer(POLL_S, self._load)
        except TandemError as error:
            text = Text(error.message, style="red")
        self.query_one("#timeline", Static).update(text)
