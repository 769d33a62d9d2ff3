"""Documents that say the same as the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tandem.request import EDGES, END_STATES, RequestState

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_drawn_lifecycle_is_the_codes() -> None:
    page = (ROOT / "docs" / "request-lifecycle.md").read_text()
    diagram = re.search(r"```mermaid\nstateDiagram-v2\n(.*?)```", page, re.DOTALL)
    assert diagram is not None
    arrows = re.findall(r"^\s*(\S+) --> (\S+)$", diagram[1], re.MULTILINE)
    drawn = {(source, target) for source, target in arrows if "[*]" not in (source, target)}
    assert drawn == {(source.value, target.value) for source, targets in EDGES.items() for target in targets}
    assert [target for source, target in arrows if source == "[*]"] == [RequestState.RECEIVED]
    assert {source for source, target in arrows if target == "[*]"} <= {state.value for state in END_STATES}
    described = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert described == [state.value for state in sorted(RequestState, key=lambda s: described.index(s.value))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_architecture_page_names_every_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        assert [name for name in packages if name not in text] == []


def test_decision_records_are_numbered_without_gaps_and_say_context_decision_consequences() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        text = record.read_text()
        assert [word for word in ("**Context.**", "**Decision.**", "**Consequences.**") if word not in text] == []
