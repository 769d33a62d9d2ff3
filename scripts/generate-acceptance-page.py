"""Writes docs/acceptance.md from tests/data/acceptance.toml and the tests' `acceptance` marks.

generate-acceptance-page.py [--check]     --check: writes nothing; exits 1 if the page is stale

A mark is `@pytest.mark.acceptance(NUMBER, here="size in make test-all", soak="size in make soak")`. `soak`: only if it
differs. Files are read, not imported.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "acceptance.md"
NONE_YET = "none yet"

INTRODUCTION = """\
# Acceptance tests

*For operators who ask what was tried, and contributors. After this page you know which faults and loads Tandem's tests
cover, and in which size.*

<!-- Generated from tests/data/acceptance.toml and the tests' marks by scripts/generate-acceptance-page.py. -->

Every test that runs workers ends with a check: `free + cached + leased + in_use = total` on each of them, and no
request without an end state. `make test-all` runs the sizes of the column "here", as CI does; `make soak` runs those of
the column "soak". Where a test is smaller than what must hold, or does not reach it, the table says so.

"""


@dataclass(frozen=True, slots=True)
class Mark:
    number: int
    here: str
    soak: str
    test: str


def marks() -> Iterator[Mark]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.acceptance":
                        yield _mark(decorator, f"{path.relative_to(ROOT)}::{node.name}")


def _mark(call: ast.Call, test: str) -> Mark:
    (number,) = (ast.literal_eval(argument) for argument in call.args)
    sizes = {str(each.arg): str(ast.literal_eval(each.value)) for each in call.keywords}
    return Mark(number, sizes.get("here", ""), sizes.get("soak", ""), test)


def page() -> str:
    wanted = tomllib.loads((ROOT / "tests" / "data" / "acceptance.toml").read_text(encoding="utf-8"))
    by_number: defaultdict[int, list[Mark]] = defaultdict(list)
    for mark in marks():
        by_number[mark.number].append(mark)
    if unknown := by_number.keys() - {int(number) for number in wanted}:
        raise SystemExit(f"acceptance marks with unknown numbers: {sorted(unknown)}")
    lines = ["| | what happens | what must hold | test | here | soak |", "|---|---|---|---|---|---|"]
    for number, (what, must) in wanted.items():
        for first, mark in enumerate(by_number[int(number)] or [Mark(int(number), "", "", NONE_YET)]):
            test = mark.test if mark.test == NONE_YET else f"`{mark.test.removeprefix('tests/')}`"
            head = (number, what, must) if first == 0 else ("", "", "")
            lines.append(f"| {' | '.join((*head, test, mark.here, mark.soak or mark.here))} |")
    missing = [number for number in wanted if not by_number[int(number)]]
    return INTRODUCTION + "\n".join(lines) + f"\n\nWithout a test yet: {', '.join(missing) or 'none'}.\n"


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is stale: run scripts/generate-acceptance-page.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
