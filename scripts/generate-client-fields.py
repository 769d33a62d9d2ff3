"""Writes the table of the official clients' fields in docs/api.md from tests/data/client-fields.toml.

generate-client-fields.py [--check]     --check: writes nothing; exits 1 if the table is stale
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marked_part import write_part

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
FIELDS = ROOT / "tests" / "data" / "client-fields.toml"
BEGIN, END = "<!-- fields: written by scripts/generate-client-fields.py -->\n", "<!-- fields end -->\n"
OUTCOMES = {"served": "served", "harmless": "taken, without effect", "refused": "refused by name"}


def table(apis: Mapping[str, Any]) -> str:
    rows = ["| API | what becomes of it | fields |\n", "|---|---|---|\n"]
    for api in apis.values():
        for number, (key, outcome) in enumerate(OUTCOMES.items()):
            found = ", ".join(_named(api["fields"], key))
            rows.append(f"| {'' if number else api['title']} | {outcome} | {found} |\n")
    return "".join(rows)


def _named(fields: Mapping[str, Any], key: str) -> Iterator[str]:
    for name, row in fields.items():
        is_served = "served" in row
        if key not in row or (is_served and key == "harmless") or (name == "model" and key == "refused"):
            continue
        values = " or ".join(f"`{json.dumps(value)}`" for value in row[key])
        is_one_of_two = not is_served and len(row.keys() & OUTCOMES.keys()) > 1
        yield f"`{name}`: {values}" if is_one_of_two or (is_served and key == "refused") else f"`{name}`"


if __name__ == "__main__":
    made = table(tomllib.loads(FIELDS.read_text(encoding="utf-8")))
    sys.exit(write_part(PAGE, BEGIN, END, made, check="--check" in sys.argv[1:]))
