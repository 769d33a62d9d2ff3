"""Writes tables and a picture from what benchmarks printed into docs/disaggregate-or-not.md, docs/others-answers.md,
docs/placement-papers.md and docs/prediction-errors.md.

generate-planner-pages.py [--check]     --check: writes nothing; exits 1 if a page or the picture is stale
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from marked_part import write_part

ROOT = Path(__file__).resolve().parent.parent
GRID = ROOT / "benchmarks" / "planner_grid.jsonl"
GRID_PAGE = ROOT / "docs" / "disaggregate-or-not.md"
ANSWERS = ROOT / "benchmarks" / "planner_answers.jsonl"
ANSWERS_PAGE = ROOT / "docs" / "others-answers.md"
PAPERS = ROOT / "benchmarks" / "planner_papers.jsonl"
PAPERS_PAGE = ROOT / "docs" / "placement-papers.md"
ERRORS = ROOT / "benchmarks" / "prediction_cells.jsonl"
ERRORS_PAGE = ROOT / "docs" / "prediction-errors.md"
PICTURE = ROOT / "docs" / "pictures" / "disaggregate-or-not.svg"
BEGIN, END = "<!-- written by scripts/generate-planner-pages.py -->", "<!-- end of what is written -->"

CLEAR, SOME = 1.5, 1.05
VERDICTS = ("clearly more", "more", "as much", "less")
# --- the picture
LEAST, MOST = 0.4, 4.0
LEFT, WIDTH, RIGHT, ROW, GAP, TOP = 330, 430, 100, 15, 26, 50
STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2733;font-size:11.5px}'
    ".h{font-weight:600;font-size:13px}.s{fill:#4a5566}.g{stroke:#d5d9e0}.one{stroke:#5b6577;stroke-width:1.5}"
    ".r{stroke:#8a94a6;stroke-width:2}"
)
COLOURS = dict(zip(VERDICTS, ("#c36a00", "#3457c4", "#5b6577", "#a02c3c"), strict=True))


@dataclass(frozen=True, slots=True)
class Cell:
    """A line of the grid. `ratio`: the disaggregated load over the aggregated; 0 or infinity: one kind serves none."""

    found: dict[str, Any]

    @property
    def is_decided(self) -> bool:
        """False: no layout of either kind meets the objectives at any load."""
        return self.found["aggregated"] is not None or self.found["disaggregated"] is not None

    @property
    def ratio(self) -> float:
        if self.found["value"] is not None:
            return float(self.found["value"])
        return 0.0 if self.found["disaggregated"] is None else math.inf

    @property
    def verdict(self) -> str:
        ratio = self.ratio
        if ratio >= CLEAR:
            return VERDICTS[0]
        return VERDICTS[1] if ratio > SOME else VERDICTS[2] if ratio >= 1 / SOME else VERDICTS[3]

    @property
    def hard(self) -> str:
        return "a hard TTFT" if self.found["figure"].endswith("_start") else "a hard TPOT"

    @property
    def group(self) -> tuple[str, str]:
        return self.found["traffic"], self.hard

    @property
    def place(self) -> str:
        found = self.found
        return f"{found['model']} on {found['devices']} {found['device'].upper()}, {found['link']}"

    @property
    def objectives(self) -> str:
        return f"TTFT {self.found['ttft_s']:g} s, TPOT {1000 * self.found['tpot_s']:g} ms"

    @property
    def shown(self) -> str:
        if not self.is_decided:
            return "neither"
        known = self.found["value"] is not None
        return f"{self.ratio:.2f}" if known else "only aggregated" if self.ratio == 0 else "only disaggregated"

    @property
    def others(self) -> tuple[float, float] | None:
        others = self.found["others"]
        return (min(others), max(others)) if others else None

    def row(self) -> list[str]:
        served = [self.found[kind] for kind in ("aggregated", "disaggregated")]
        loads = [
            "none"
            if each is None
            else f"{each['requests_per_s']:.3g} by `{each['layout'].removeprefix('aggregated ')}`"
            for each in served
        ]
        spread = "" if self.others is None else f"{self.others[0]:.2f} to {self.others[1]:.2f}"
        return [self.place, self.objectives, *loads, self.shown, spread]


def read(lines: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.read_text().splitlines()]


def grouped(cells: Sequence[Cell]) -> list[tuple[tuple[str, str], list[Cell]]]:
    order = {group: at for at, group in enumerate(dict.fromkeys(cell.group for cell in cells))}
    found = sorted(cells, key=lambda cell: order[cell.group])
    return [(group, list(some)) for group, some in groupby(found, key=lambda cell: cell.group)]


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = lines
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def tables(cells: Sequence[Cell]) -> str:
    groups = grouped(cells)
    counted = [
        (f"{traffic}, {hard}", Counter(cell.verdict for cell in some if cell.is_decided))
        for (traffic, hard), some in groups
    ]
    rows = [[name, *(str(counts[each] or "") for each in VERDICTS)] for name, counts in counted]
    made = ["", *table([["cells where disaggregation serves", *VERDICTS], *rows]), ""]
    head = [
        "model and devices",
        "objectives",
        "requests/s, aggregated",
        "requests/s, disaggregated",
        "ratio",
        "of others",
    ]
    for (traffic, hard), some in groups:
        made += [f"### {traffic.capitalize()}, {hard}", "", *table([head, *(cell.row() for cell in some)]), ""]
    return "\n".join(made)


# ---- the picture


def at(ratio: float) -> float:
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(LEFT + share * WIDTH, 1)


def drawn(cell: Cell, y: float) -> list[str]:
    made = [f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" class="s">{cell.place}</text>']
    if cell.others is not None:
        made.append(f'<line x1="{at(cell.others[0])}" x2="{at(cell.others[1])}" y1="{y}" y2="{y}" class="r"/>')
    if cell.is_decided:
        made.append(f'<circle cx="{at(cell.ratio)}" cy="{y}" r="4" fill="{COLOURS[cell.verdict]}"/>')
    made.append(f'<text x="{LEFT + WIDTH + 14}" y="{y + 4}">{cell.shown}</text>')
    return made


def picture(cells: Sequence[Cell]) -> str:
    body, y = list[str](), TOP
    for (traffic, hard), some in grouped(cells):
        body.append(f'<text x="20" y="{y}" class="h">{traffic}, {hard}</text>')
        y += 16
        for cell in some:
            body += drawn(cell, y)
            y += ROW
        y += GAP - ROW + 6
    ticks = list[str]()
    for ratio in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0):
        kind = "one" if ratio == 1.0 else "g"
        ticks.append(f'<line x1="{at(ratio)}" x2="{at(ratio)}" y1="34" y2="{y - 14}" class="{kind}"/>')
        ticks.append(f'<text x="{at(ratio)}" y="26" text-anchor="middle" class="s">{ratio:g}</text>')
    width, height = LEFT + WIDTH + RIGHT + 20, y
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    return "\n".join(
        [
            f'{opening} role="img" aria-labelledby="t d">',
            '<title id="t">Load of the best disaggregated layout over that of the best aggregated one</title>',
            '<desc id="d">A dot for each cell of the grid, a line for the range with other traffic of its kind.</desc>',
            f"<style>{STYLE}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" fill="#fbfbfd" stroke="#d5d9e0"/>',
            *ticks, *body, "</svg>", "",
        ]
    )  # fmt: skip


# ---- the answers of others


def pool(given: Sequence[int]) -> str:
    return f"{given[0]}x{given[1]}"


def their_layout(theirs: dict[str, Any]) -> str:
    if theirs["prefill"] is None:
        return f"{pool(theirs['decode'])} of {theirs['devices']}"
    return f"{pool(theirs['prefill'])} : {pool(theirs['decode'])} of {theirs['devices']}"


def served(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    return f"{found['requests_per_s']:.3g} by `{found['layout'].removeprefix('aggregated ')}`"


def answers(lines: Sequence[dict[str, Any]]) -> str:
    head = [
        "question",
        "kind",
        "aiconfigurator",
        "Tandem, its layout",
        "Tandem, best layout",
        "ratio",
        "random arrivals",
    ]
    rows = []
    for line in lines:
        asked, theirs, ours = line["asked"], line["theirs"], line["ours"]
        question = (
            f"{asked['model']} on {asked['total_gpus']} {asked['device'].upper()}, "
            f"{asked['isl']}/{asked['osl']} tokens, TTFT {asked['ttft'] / 1000:g} s, TPOT {asked['tpot']:g} ms"
        )
        their = "none" if theirs is None else f"{line['reference']:.3g} by `{their_layout(theirs)}`"
        at = ours.get("at_theirs")
        at_theirs = (
            "no such layout" if "at_theirs" not in ours else "none" if at is None else f"{at['requests_per_s']:.3g}"
        )
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        kind = line["figure"].rpartition("_")[2]
        rows.append([question, kind, their, at_theirs, served(ours["even"]), ratio, served(ours["random"])])
    return "\n".join(["", *table([head, *rows]), ""])


# ---- the rules of papers


def papers(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each traffic and objectives, a column for each rule."""
    rules = list(dict.fromkeys(line["rule"] for line in lines))
    rows = []
    for _, some in groupby(lines, key=lambda line: (line["traffic"], line["objectives"])):
        found = {line["rule"]: line for line in some}
        first = found[rules[0]]
        asked = f"{first['traffic']}, TTFT {first['ttft_s']:.2g} s, TPOT {1000 * first['tpot_s']:.2g} ms"
        rows.append([asked, *(rule_cell(found[rule]) for rule in rules)])
    heads = [rule.replace("_bounded", ", bounded steps") for rule in rules]
    return "\n".join(["", *table([["traffic and objectives", *heads], *rows]), ""])


def rule_cell(line: dict[str, Any]) -> str:
    if line["layout"] is None:
        return "none"
    return f"{line['value']:.2f} by `{line['layout'].removeprefix('aggregated ')}`"


# ---- errors of predictions


def prediction_errors(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each cell, a table for each format of the weights."""
    made = [""]
    for (share, weights), some in groupby(lines, key=lambda line: (line["share"], line["cell"].partition("_")[0])):
        cells = list(some)
        metrics = list(cells[0]["errors"])
        heads = ["shape, traffic", "requests", "capacity", *metrics, "drift"]
        rows = []
        for cell in cells:
            _, shape, traffic = cell["cell"].split("_")
            name = f"{'aggregated' if shape.startswith('0') else shape}, {traffic}"
            errors = [error_cell(*cell["errors"][metric]) for metric in metrics]
            capacity, drift = signed(cell["capacity"]), f"{100 * cell['drift']:.0f}"
            rows.append([name, str(cell["requests"]), capacity, *errors, drift])
        made += [f"At {share} % of the measured capacity, weights in {weights}:", "", *table([heads, *rows]), ""]
    return "\n".join(made)


def error_cell(value: float, low: float, high: float) -> str:
    return f"{signed(value)} ({signed(low)} to {signed(high)})"


def signed(share: float) -> str:
    """In percent, or points."""
    percent = round(100 * share)
    return "0" if not percent else f"{'+' if percent > 0 else '−'}{abs(percent)}"


def main(*, check: bool) -> int:
    cells = [Cell(line) for line in read(GRID)]
    made = picture(cells)
    if check and PICTURE.read_text() != made:
        print(f"docs/pictures/{PICTURE.name} is stale: run make docs", file=sys.stderr)
        return 1
    if not check:
        PICTURE.write_text(made)
    stale = write_part(GRID_PAGE, BEGIN, END, tables(cells), check=check)
    stale = stale or write_part(ANSWERS_PAGE, BEGIN, END, answers(read(ANSWERS)), check=check)
    stale = stale or write_part(PAPERS_PAGE, BEGIN, END, papers(read(PAPERS)), check=check)
    return stale or write_part(ERRORS_PAGE, BEGIN, END, prediction_errors(read(ERRORS)), check=check)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
