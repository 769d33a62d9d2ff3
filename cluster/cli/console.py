"""What commands print on: a terminal's width is kept to, a file or a pipe gets whole lines; tables fit either."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns
FOLDED = 20  # what a column that may be folded is granted before others are left out

_WIDE = Console(width=UNLIMITED)


def console() -> Console:
    """For stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNLIMITED)


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
    """A table of `width` columns at most, whose cells are never shortened.

    Args:
        left: titles of the columns that are justified left; figures stand right.
        spare: titles of the columns that may be missing where there is no room, the first to go first.
        folded: titles of the columns whose cells may go on in the next line. Where nothing else helps, all do.
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

    gone = 0
    while gone < len(spare) and _width(build(spare[:gone], FOLDED)) > width:
        gone += 1
    return build(spare[:gone], None)


BOXED = HEAVY_HEAD


def _plain(cell: RenderableType) -> RenderableType:
    """Text is not markup: names and notes come from people."""
    return Text(cell) if isinstance(cell, str) else cell


def _width(table: Table) -> int:
    """With every cell in one line, but for those that may be folded."""
    table.title = None
    return Measurement.get(_WIDE, _WIDE.options, table).maximum
