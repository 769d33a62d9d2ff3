"""Writes the tables of docs/performance.md and docs/performance-method.md from benchmarks/figures.toml, and compares
the figures that docs/techniques.md quotes with it.

generate-figures.py [--check]     --check: writes nothing; exits 1 if a table is stale
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from marked_part import write_part

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures.toml"
PAGE = ROOT / "docs" / "performance.md"
METHOD_PAGE = ROOT / "docs" / "performance-method.md"
TECHNIQUES_PAGE = ROOT / "docs" / "techniques.md"
MARK = "written by scripts/generate-figures.py -->"
BEGIN, END = f"<!-- {MARK}", "<!-- end of what is written -->"

MACHINES = ("quiet", "shared", "–")
RESULTS = ("met", "missed")


@dataclass(frozen=True, slots=True)
class Figure:
    """Fields as in benchmarks/figures.toml."""

    name: str
    area: str
    means: str
    value: str
    machine: str
    reference: str | None = None
    target: str | None = None
    result: str | None = None
    method_only: bool = False

    def check(self) -> None:
        if self.machine not in MACHINES:
            raise SystemExit(f"{FIGURES.name}: {self.name}: machine: expected one of {MACHINES}, got {self.machine!r}")
        results = RESULTS if self.target else (None,)
        if self.result not in results:
            raise SystemExit(f"{FIGURES.name}: {self.name}: result: expected one of {results}, got {self.result!r}")


def read() -> dict[str, Figure]:
    figures = dict[str, Figure]()
    for name, fields in tomllib.loads(FIGURES.read_text(encoding="utf-8")).items():
        try:
            figures[name] = Figure(name, **fields)
        except TypeError as error:
            raise SystemExit(f"{FIGURES.name}: {name}: {error}") from error
        figures[name].check()
    return figures


def by_area(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    areas = defaultdict[str, list[Figure]](list)
    for figure in figures:
        areas[figure.area].append(figure)
    return areas


def table(head: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    lines = [head, ["---"] * len(head), *([cell or "" for cell in row] for row in rows)]
    return "\n".join(["", *(f"| {' | '.join(line)} |" for line in lines), ""])


def summary(areas: Mapping[str, Sequence[Figure]]) -> str:
    """What users read: an area links to the section that says how its figures are measured."""
    rows = []
    for area, figures in areas.items():
        shown = [each for each in figures if not each.method_only]
        for number, each in enumerate(shown):
            link = "" if number else f"[{area}]({METHOD_PAGE.name}#{area.replace(' ', '-')})"
            rows.append([link, f"`{each.name}`", each.means, each.value, each.reference, each.machine])
    return table(["area", "figure", "what it means", "value", "reference", "machine"], rows)


def targets(figures: Sequence[Figure]) -> str:
    """An area's table on the method page, without columns that are empty."""
    head = ["figure", "what it means", "value", "reference", "target", "result", "machine"]
    rows = [
        [f"`{each.name}`", each.means, each.value, each.reference, each.target, each.result, each.machine]
        for each in figures
    ]
    kept = [at for at in range(len(head)) if any(row[at] for row in rows)]
    return table([head[at] for at in kept], [[row[at] for at in kept] for row in rows])


def check_marks(areas: Mapping[str, Sequence[Figure]]) -> None:
    """Each area has a heading of its name on the method page, and below it the mark of its table."""
    page = METHOD_PAGE.read_text(encoding="utf-8")
    found = re.findall(rf"^##+ (.+)$|^<!-- (.+): {re.escape(MARK)}$", page, re.MULTILINE)
    marked = [area for (heading, _), (_, area) in pairwise(found) if area and heading.lower() == area]
    if sorted(marked) != sorted(areas) or len(marked) != sum(bool(area) for _, area in found):
        raise SystemExit(f"{METHOD_PAGE.name}: expected sections with marks {sorted(areas)}, got {sorted(marked)}")
    if PAGE.read_text(encoding="utf-8").count(BEGIN) != 1:
        raise SystemExit(f"{PAGE.name}: expected one {BEGIN!r}")


def misquoted(page: Path, figures: Mapping[str, Figure]) -> Iterator[str]:
    """A figure's name is followed by its value, and that by nothing in parentheses but its reference."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"`([a-z]+\.\w+)`", text):
        figure = figures.get(found[1])
        if figure is None:
            yield f"{found[1]} is not in {FIGURES.name}"
            continue
        quoted = rf" {re.escape(figure.value)}(?!\w|[.,]\d)"
        if figure.reference:
            quoted += rf"(?! \((?!{re.escape(figure.reference)}\)))"
        if not re.match(quoted, text[found.end() :]):
            after = text[found.end() :].partition("\n")[0][:40]
            yield f"{found[1]}: expected {figure.value!r} ({figure.reference}) after it, got {after!r}"


def main(*, check: bool) -> int:
    figures = read()
    areas = by_area([*figures.values()])
    check_marks(areas)
    wrong = [*misquoted(TECHNIQUES_PAGE, figures)]
    for each in wrong:
        print(f"docs/{TECHNIQUES_PAGE.name}: {each}", file=sys.stderr)
    stale = write_part(PAGE, BEGIN, END, summary(areas), check=check)
    for area, some in areas.items():
        stale = stale or write_part(METHOD_PAGE, f"<!-- {area}: {MARK}", END, targets(some), check=check)
    return stale or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
