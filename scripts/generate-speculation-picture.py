"""Draws what speculation gains by workload and batch, as measured, and writes the table beside it into
docs/speculation.md.

generate-speculation-picture.py [--check]     --check: writes nothing; exits 1 if the page or the picture is stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from marked_part import write_part

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "benchmarks" / "speculation_batches.jsonl"
PAGE = ROOT / "docs" / "speculation.md"
PICTURE = ROOT / "docs" / "pictures" / "speculation.svg"
BEGIN, END = "<!-- written by scripts/generate-speculation-picture.py -->", "<!-- end of what is written -->"

COLOURS = {"copy": "#c36a00", "mixed": "#3457c4", "chat": "#5b6577"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 300, 60, 40, 80, 50
STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2733;font-size:12px}'
    ".h{font-weight:600;font-size:13px}.g{stroke:#d5d9e0}.one{stroke:#5b6577;stroke-width:1.5}"
    "polyline{fill:none;stroke-width:2}"
)

Ratios = dict[str, dict[int, float]]


def measured() -> Ratios:
    """By workload and batch, how many times as fast answers are with `auto`."""
    found: Ratios = {workload: {} for workload in COLOURS}
    for line in map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines()):
        workload, batch = line["figure"].removeprefix("spec.auto_").split("_b")
        found[workload][int(batch)] = line["ratio"]
    return found


def table(ratios: Ratios) -> str:
    batches = sorted({batch for of_batch in ratios.values() for batch in of_batch})
    rows = [["requests in the batch", *map(str, batches)], ["---"] * (1 + len(batches))]
    for workload, of_batch in ratios.items():
        rows.append([workload, *(f"{of_batch[batch]:.2f}" if batch in of_batch else "" for batch in batches)])
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), ""])


def described(ratios: Ratios) -> str:
    ends = {workload: (of_batch[min(of_batch)], of_batch[max(of_batch)]) for workload, of_batch in ratios.items()}
    lines = "; ".join(f"{workload}: from {first:.1f} to {last:.1f} times" for workload, (first, last) in ends.items())
    return f"Three lines over the number of requests in the batch, from few to many. {lines}."


def picture(ratios: Ratios) -> str:
    batches = sorted({batch for of_batch in ratios.values() for batch in of_batch})
    most = 0.5 * (int(max(ratio for of_batch in ratios.values() for ratio in of_batch.values()) / 0.5) + 1)
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(batch: int) -> float:
        return LEFT + across * batches.index(batch) / (len(batches) - 1)

    def y(ratio: float) -> float:
        return TOP + down * (1 - ratio / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Speed with speculation over that without, by workload and batch</title>",
        f"<desc>{described(ratios)}</desc><style>{STYLE}</style>",
        f'<text class="h" x="{LEFT}" y="20">Speed with auto over that without</text>',
    ]
    for half in range(int(2 * most) + 1):
        at = y(half / 2)
        kind = "one" if half == 2 else "g"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{half / 2:g}</text>')
    for batch in batches:
        parts.append(f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{batch}</text>')
    middle = LEFT + across / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">requests in the batch</text>')
    for workload, of_batch in ratios.items():
        points = [(x(batch), y(ratio)) for batch, ratio in sorted(of_batch.items())]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline stroke="{COLOURS[workload]}" points="{line}"/>')
        parts += [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{COLOURS[workload]}"/>' for cx, cy in points]
    ends = sorted((y(of_batch[max(of_batch)]), workload) for workload, of_batch in ratios.items())
    lowest = 0.0
    for at, workload in ends:  # names of lines that end close together stand below each other
        lowest = max(at + 4, lowest + 15)
        parts.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{lowest:.1f}" style="fill:{COLOURS[workload]}">{workload}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(*, check: bool) -> int:
    ratios = measured()
    made = picture(ratios)
    if check and PICTURE.read_text(encoding="utf-8") != made:
        print(f"docs/pictures/{PICTURE.name} is stale: run make docs", file=sys.stderr)
        return 1
    if not check:
        PICTURE.write_text(made, encoding="utf-8")
    return write_part(PAGE, BEGIN, END, table(ratios), check=check)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
