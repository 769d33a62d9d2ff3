"""The part of a page in docs/ that a script writes, between two marks."""

from __future__ import annotations

import sys
from pathlib import Path


def write_part(page: Path, begin: str, end: str, made: str, *, check: bool) -> int:
    """Replaces it by `made`. `check`: writes nothing, and returns 1 if the page is stale."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    wanted = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    if check and text != wanted:
        print(f"docs/{page.name} is stale: run make docs", file=sys.stderr)
        return 1
    if not check:
        page.write_text(wanted, encoding="utf-8")
    return 0
