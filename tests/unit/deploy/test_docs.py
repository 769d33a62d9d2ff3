"""Documents that say the same as the code."""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from cluster.cli.main import app
from tandem.config.spec import ClusterSpec
from tandem.request import EDGES, END_STATES, RequestState

ROOT = Path(__file__).resolve().parents[3]
COMMANDS: Any = get_command(app)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    folders = {each.name for each in ROOT.iterdir() if each.is_dir()} - {"dist"}  # what is built is not always there
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|sh|yaml|toml|json|proto|lock|txt))`", page.read_text()):
        if page.name != "CHANGELOG.md" and name.split("/")[0] in folders:
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_can_be_read_where_it_lies(page: Path) -> None:
    """On a hosting site or in a clone: what a comment stands for would be missing there."""
    read = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    assert len(read.split()) > 40


def test_the_first_page_leads_to_every_other() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (docs / "index.md").read_text()))
    pages = {page.name for page in docs.glob("*.md")} - {"index.md"}
    assert pages | {"runbooks/index.md"} <= linked


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


def code_of(page: Path) -> str:
    """Commands, each at the beginning of a line: those in blocks and those in running text."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_is_there(page: Path) -> None:
    commands = set(COMMANDS.commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^(?:\$ )?tandem ([a-z]+(?:-[a-z]+)*)", code_of(page), re.MULTILINE)) <= commands
    assert set(re.findall(r"^make ([a-z-]+)", code_of(page), re.MULTILINE)) <= targets


def test_every_metric_that_troubleshooting_names_is_explained() -> None:
    named = set(re.findall(r"`(tandem_\w+)", (ROOT / "docs" / "troubleshooting.md").read_text()))
    explained = (ROOT / "docs" / "observability.md").read_text()
    assert [metric for metric in sorted(named) if metric not in explained] == []


def test_every_drawing_has_a_picture_for_the_site() -> None:
    for page in PAGES:
        text = page.read_text()
        pictures = re.findall(r"<!-- picture: (\S+) -->\n```mermaid", text)
        assert len(pictures) == text.count("```mermaid"), page
        assert all((ROOT / "docs" / "pictures" / name).exists() for name in pictures), page


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_says_in_words_what_it_shows_and_needs_nothing_else(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title")
    assert root.findtext(f"{space}desc")
    assert root.find(f".//{space}script") is None
    assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")
    assert any(picture.name in page.read_text() for page in PAGES), "no page shows it"


def test_every_values_snippet_of_the_deploy_page_is_what_the_chart_takes() -> None:
    schema = json.loads((ROOT / "helm" / "tandem" / "values.schema.json").read_text())
    schema["required"] = []  # the rest has defaults in values.yaml
    snippets = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) > 3
    for snippet in snippets:
        values = yaml.safe_load(snippet)
        jsonschema.validate(values, schema)
        ClusterSpec.model_validate(values.get("cluster", {}))


def test_the_charts_readme_has_every_value_beside_the_cluster_spec() -> None:
    """A free-form object, such as a securityContext, is one value."""
    chart = ROOT / "helm" / "tandem"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    rows = dict(
        re.findall(r"^\| `([\w.]+)` \| [^\n]* \| `(.*?)` \| [^|\n]*\|$", (chart / "README.md").read_text(), re.M)
    )

    def check(path: str, value: object) -> None:
        if path in rows:
            assert json.loads(rows[path]) == value, path
            return
        assert isinstance(value, dict), path
        assert value, path
        for key, each in value.items():
            check(f"{path}.{key}", each)

    for name in values.keys() - {"cluster"}:
        check(name, values[name])
    assert len(rows) > 150


def test_the_workflow_for_kind_runs_what_the_deploy_page_says() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.partition("### On kind\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    jobs = yaml.safe_load((ROOT / "deploy" / "kind" / "kind.yaml").read_text())["jobs"]
    steps = [step["run"] for step in jobs["kind"]["steps"] if "run" in step]
    assert len(blocks) == 3
    assert blocks == steps[:3]
