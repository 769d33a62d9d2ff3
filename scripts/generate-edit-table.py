"""Writes the table of edits and the pods that they replace in docs/deploy.md, from renders and a model of KubeRay.

generate-edit-table.py [--check]     --check: writes nothing; exits 1 if the table is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from marked_part import write_part

from cluster.testing.chart_edits import BASES, rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deploy.md"
BEGIN, END = "<!-- edits: written by scripts/generate-edit-table.py -->\n", "<!-- edits end -->\n"


def table() -> str:
    head = ["changed", *BASES]
    lines = [head, ["---"] * len(head), *([title, *cells] for title, cells in rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(write_part(PAGE, BEGIN, END, table(), check="--check" in sys.argv[1:]))
