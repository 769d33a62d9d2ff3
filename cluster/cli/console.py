"""Console output: fits a terminal's width; a file or pipe gets whole lines."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns
FOLDED = 20  # width of a folded column before other columns are dropped

STATE_STYLES = {
    "ready": "green", "healthy": "green", "finished": "green", "suspect": "yellow", "probation": "yellow",
    "starting": "yellow", "restarting": "yellow", "not_ready": "yellow", "connecting": "yellow", "rejected": "yellow",
    "draining": "yellow", "leaving": "yellow", "cancelled": "dim", "ejected": "red", "failed": "red",
    "unreachable": "red", "link_lost": "red", "down": "red", "refused": "red",
}  # fmt: skip

_WIDE = Console(width=UNLIMITED)


def console() -> Console:
    """The console for stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNLIMITED)


def style_of(state: str, unknown: str = "cyan") -> str:
    """Of the state or health of a worker, router, link or request."""
    return STATE_STYLES.get(state, unknown)


def fitted(
    width: int,
    titles: Sequence[str],
    rows: Sequence[Sequence[RenderableType]],
    *,
    left: Collection[str],
    spare: Sequence[str] = (),
    folded: Collection[str] = (),
    title: str | None = None,
    box: Box | None = None,
    header_style: str = "table.header",
) -> Table:
    """A table at most `width` characters wide, whose cells are never truncated.

    Args:
        left: titles of left-justified columns; all others are right-justified.
        spare: titles of columns that may be dropped, in this order.
        folded: titles of columns whose cells may wrap. If dropping columns is not enough, all cells wrap.
    """

    def build(without: Collection[str], most: int | None) -> Table:
        padding = (0, 1) if box is not None else (0, 1, 0, 0)
        table = Table(title=title, box=box, pad_edge=box is not None, padding=padding, header_style=header_style)
        kept = [number for number, each in enumerate(titles) if each not in without]
        for number in kept:
            name = titles[number]
            table.add_column(
                name,
                justify="left" if name in left else "right",
                overflow="fold",
                no_wrap=number == 0,
                max_width=most if name in folded else None,
            )
        for row in rows:
            table.add_row(*(_plain(row[number]) for number in kept))
        return table

    dropped = 0
    while dropped < len(spare) and _width(build(spare[:dropped], FOLDED)) > width:
        dropped += 1
    return build(spare[:dropped], None)


BOXED = HEAVY_HEAD


def _plain(cell: RenderableType) -> RenderableType:
    """Strings are not markup, since users choose names and notes."""
    return Text(cell) if isinstance(cell, str) else cell


def _width(table: Table) -> int:
    """The width with every cell on one line, except cells that may wrap."""
    table.title = None
    return Measurement.get(_WIDE, _WIDE.options, table).maximum
