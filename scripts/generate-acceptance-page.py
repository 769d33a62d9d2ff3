"""Writes docs/acceptance.md from tests/data/acceptance.toml, the last results and the tests' `acceptance` marks.

generate-acceptance-page.py [--check]     --check: writes nothing; exits 1 if the page is stale

A mark is `@pytest.mark.acceptance(NUMBER, here="size in make test-all", soak="size in make soak")`. It has `soak` if
and only if `make soak` runs the test: it, one of its parameters or its module is marked soak or soak_only. Files are
read, not imported. `make test-all ARGS="--acceptance-results"` and `make soak` with the same note how the tests ended.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "data" / "acceptance-results.toml"
PAGE = ROOT / "docs" / "acceptance.md"
NONE_YET = "none yet"

INTRODUCTION = """\
# Acceptance tests

*For operators who ask what was tried, and contributors. After this page you know which faults and loads Tandem's tests
cover, and in which size.*

<!-- Generated from tests/data/acceptance.toml and the tests' marks by scripts/generate-acceptance-page.py. -->

Every test that runs workers ends with a check: `free + cached + leased + in_use = total` on each of them, and no
request without an end state. `make test-all` and `make check-deploy` run the sizes of the column "here", as CI does;
`make soak` runs those of the column "soak", and only those. Where a test is smaller than what must hold, or does not
reach it, the table says so.
The last columns tell how the last noted run of each ended.

"""


@dataclass(frozen=True, slots=True)
class Mark:
    number: int
    here: str
    soak: str
    test: str


def marks() -> Iterator[Mark]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        of_module = [assigned["pytestmark"]] if "pytestmark" in assigned else []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.acceptance":
                        mark = _mark(decorator, f"{path.relative_to(ROOT)}::{node.name}")
                        _check(mark, _names_soak([*node.decorator_list, *of_module], assigned))
                        yield mark


def _mark(call: ast.Call, test: str) -> Mark:
    (number,) = (ast.literal_eval(argument) for argument in call.args)
    sizes = {str(each.arg): str(ast.literal_eval(each.value)) for each in call.keywords}
    return Mark(number, sizes.get("here", ""), sizes.get("soak", ""), test)


def _names_soak(marks: Iterable[ast.expr], assigned: Mapping[str, ast.expr]) -> bool:
    """Whether these marks, or what they name in the module, have soak or soak_only among them."""
    for node in (each for mark in marks for each in ast.walk(mark)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("pytest.mark.soak", "pytest.mark.soak_only"):
            return True
        if isinstance(node, ast.Name) and node.id in assigned and _names_soak([assigned[node.id]], {}):
            return True
    return False


def _check(mark: Mark, in_soak: bool) -> None:
    if bool(mark.soak) != in_soak:
        do = (
            "give its acceptance mark soak=..."
            if in_soak
            else "mark it soak, or take soak=... from its acceptance mark"
        )
        raise SystemExit(f"{mark.test}: `make soak` {'runs' if in_soak else 'does not run'} it; {do}")


def page() -> str:
    wanted = tomllib.loads((ROOT / "tests" / "data" / "acceptance.toml").read_text(encoding="utf-8"))
    results = tomllib.loads(RESULTS.read_text(encoding="utf-8"))
    by_number: defaultdict[int, list[Mark]] = defaultdict(list)
    for mark in marks():
        by_number[mark.number].append(mark)
    if unknown := by_number.keys() - {int(number) for number in wanted}:
        raise SystemExit(f"acceptance marks with unknown numbers: {sorted(unknown)}")
    lines = [
        "| | what happens | what must hold | test | here | soak | last run here | last soak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, (what, must) in wanted.items():
        for first, mark in enumerate(by_number[int(number)] or [Mark(int(number), "", "", NONE_YET)]):
            test = mark.test if mark.test == NONE_YET else f"`{mark.test.removeprefix('tests/')}`"
            head = (number, what, must) if first == 0 else ("", "", "")
            last = results.get(mark.test, {})
            cells = (*head, test, mark.here, mark.soak, last.get("here", ""), last.get("soak", ""))
            lines.append(f"| {' | '.join(cells)} |")
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
