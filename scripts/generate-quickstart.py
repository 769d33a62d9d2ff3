"""Writes docs/quickstart.md from the README. Tests run the README's commands.

generate-quickstart.py [--check]     --check: writes nothing; exits 1 if the page is stale
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
SECTIONS = (
    "Two commands", "Serve", "Call it", "Serve your own model", "Set the ratio", "Plan it", "When something is wrong",
)  # fmt: skip

INTRODUCTION = """\
# Quick start

<!-- Generated from README.md by scripts/generate-quickstart.py; change that and run `make docs`. -->

*For everyone. After this page you have run a cluster, called it and changed its pools.* All of it runs on a laptop
without a GPU. Run the commands in a clone of the repository.
"""
END = """\
Next: [how Tandem works](concepts.md), or [how to find out where a request spent its time](observability.md).
"""

_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
_TEST_MARK = re.compile(r"<!-- test: .+? -->\n")


def page(readme: str) -> str:
    """The sections of `readme` for beginners, with links relative to docs/. Raises KeyError."""
    parts = re.split(r"^## (.+)\n", readme, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = "\n".join(f"## {title}\n{sections[title]}".rstrip() + "\n" for title in SECTIONS)
    moved = _LINK.sub(lambda found: f"]({os.path.relpath(ROOT / found[1], PAGE.parent)}", _TEST_MARK.sub("", text))
    return "\n".join((INTRODUCTION, moved, END))


def main(check: bool) -> int:
    wanted = page((ROOT / "README.md").read_text(encoding="utf-8"))
    if check:
        if PAGE.read_text(encoding="utf-8") != wanted:
            print("docs/quickstart.md is stale: run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
