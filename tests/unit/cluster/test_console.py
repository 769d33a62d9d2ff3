"""Tables of the command line: whole without a terminal, fewer columns on a narrow one, never a shortened name."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from cluster.cli import console as consoles
from cluster.cli.console import BOXED, UNLIMITED, fitted

TITLES = ("worker", "role", "epoch", "blocks", "note")
ROWS = [
    ("decode-0", "decode", "4611686018427387904", "12", "a note of [some] words that goes on"),
    ("llama-3-8b-decode-1", "decode", "7", "1200", Text("short", style="green")),
]


def drawn(width: int, **options: object) -> list[str]:
    given = {"left": ("worker", "role", "note"), "spare": ("epoch", "blocks"), **options}
    screen = Console(width=width, file=io.StringIO(), record=True)
    screen.print(fitted(width, TITLES, ROWS, **given))  # type: ignore[arg-type]
    return screen.export_text().splitlines()


@pytest.mark.parametrize(
    ("width", "folded", "titles"),
    [
        (UNLIMITED, (), "worker role epoch blocks note"),
        (84, (), "worker role blocks note"),
        (68, (), "worker role note"),
        (75, ("note",), "worker role epoch blocks note"),
        (58, ("note",), "worker role blocks note"),
        (50, ("note",), "worker role note"),
    ],
)
def test_columns_that_can_be_spared_go_in_their_order(width: int, folded: tuple[str, ...], titles: str) -> None:
    lines = drawn(width, folded=folded)
    assert " ".join(lines[0].split()) == titles
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "llama-3-8b-decode-1" in text
    assert "…" not in text
    assert "[some]" in text


def test_where_nothing_can_be_left_out_cells_go_on_in_the_next_line() -> None:
    text = "\n".join(drawn(34, spare=("epoch", "blocks")))
    assert "llama-3-8b-decode-1" in text
    assert "…" not in text


def test_a_title_does_not_widen_a_table_and_a_frame_counts() -> None:
    assert "epoch" not in drawn(84, title="x" * 60, box=BOXED)[2]
    assert "epoch" in "\n".join(drawn(110, title="x" * 60, box=BOXED))


def test_without_a_terminal_lines_are_as_long_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    consoles.console().print("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1
