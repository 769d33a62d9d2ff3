"""One request's timeline, over the tables of `tandem top`."""

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

AGAIN_S = 1.0
_MARGIN = 8


class TraceSource(Protocol):
    async def trace(self, request_id: str) -> trace_pb2.RequestTrace:
        """Raises NotFound while it has not ended, TandemError."""
        ...


class RequestScreen(ModalScreen[None]):
    """A request that is still on its way is asked for again until it has ended."""

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
            yield Static("looking it up…", id="timeline")
        yield Footer()

    def on_mount(self) -> None:
        self._look()

    @work(exclusive=True)
    async def _look(self) -> None:
        text: RenderableType
        try:
            trace = await self._source.trace(self._request_id)
            console = Console(width=max(60, int(self.app.size.width * 0.94) - _MARGIN), record=True, file=io.StringIO())
            show(trace, console)
            text = Text.from_ansi(console.export_text(styles=True))
        except NotFound:
            text = Text("on its way, or no longer kept: its timeline comes when it has ended", style="yellow")
            self.set_timer(AGAIN_S, self._look)
        except TandemError as error:
            text = Text(error.message, style="red")
        self.query_one("#timeline", Static).update(text)
