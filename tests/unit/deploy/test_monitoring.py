"""Dashboards, rules and runbooks: one of each where one belongs, and no metric in them that no router exports."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as grafana

from deploy.grafana.dashboards import DASHBOARDS
from router.app import RouterApp
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.observability import CostSpec, ObservabilitySpec, TracingSpec
from tandem.config.router import RouterSpec
from tandem.testing.models import write_tiny_llama

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "helm" / "tandem" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERT_FILES = sorted((FILES / "alerts").glob("*.yaml"))
GROUPS: list[dict[str, Any]] = [each for path in ALERT_FILES for each in yaml.safe_load(path.read_text())["groups"]]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
PAGES = {page.stem: page for page in RUNBOOKS.glob("*.md") if page.stem != "index"}
SECTIONS = ["## First look", "## On Kubernetes", "## Causes and fixes", "## Over when"]
GRID_COLUMNS = 24
OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((FILES / "dashboards").glob("*.json")):
        yield path.name, json.loads(path.read_text())


@pytest.fixture(params=[name for name, _ in dashboards()])
def shown(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A dashboard of the chart."""
    return dict(dashboards())[request.param]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(metrics_page(write_tiny_llama(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def exported(page: str) -> frozenset[str]:
    """Names of all series that a router may show, and those that rules record."""
    names = {rule["record"] for rule in RULES if "record" in rule}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        names |= {name + part for part in OF_A_HISTOGRAM} if kind == "histogram" else {name}
    return frozenset(names)


async def metrics_page(model_dir: Path) -> str:
    """What a router with everything turned on says of itself before anything happened."""
    served = ServedModel(name="tiny", model_dir=str(model_dir), model_fingerprint="f", block_tokens=16)
    app = RouterApp(
        RouterLaunch(
            cluster="test",
            router_id="router-0",
            router=RouterSpec(http_port=0, grpc_port=0),
            models=(served,),
            controller_address="127.0.0.1:1",
            redis_url="redis://127.0.0.1:1",
            observability=ObservabilitySpec(
                tracing=TracingSpec(otlp_endpoint="http://127.0.0.1:1"), cost=CostSpec(per_rank_hour=2.0)
            ),
        )
    )
    try:
        return app.metrics.render().decode()
    finally:
        await app.close()


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b((?:tandem[_:]|process_)[a-z0-9_:]+)", text))


def test_the_charts_dashboards_are_those_of_the_source() -> None:
    assert {name: each.to_json() for name, each in DASHBOARDS.items()} == {
        path.name: path.read_text() for path in (FILES / "dashboards").glob("*.json")
    }


def test_grafana_reads_a_dashboard_as_it_was_meant(shown: dict[str, Any]) -> None:
    read = grafana.Dashboard.from_json(shown)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == shown


def test_panels_fill_their_rows_and_say_what_they_show(shown: dict[str, Any]) -> None:
    panels = [panel for panel in shown["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])
    for panel in panels:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDE"[: len(panel["targets"])])
    taken = Counter(
        (column, line)
        for each in (panel["gridPos"] for panel in shown["panels"])
        for column in range(each.get("x", 0), each.get("x", 0) + each["w"])
        for line in range(each.get("y", 0), each.get("y", 0) + each["h"])
    )
    assert set(taken.values()) == {1}, "panels that cover one another"
    lines = {line for _, line in taken}
    assert len(taken) == GRID_COLUMNS * len(lines), "a row with a hole"


def test_every_metric_of_dashboards_rules_and_runbooks_is_exported(exported: frozenset[str]) -> None:
    texts = {name: json.dumps(each) for name, each in dashboards()}
    texts |= {rule.get("alert", rule.get("record", "")): rule["expr"] for rule in RULES}
    texts |= {page.name: page.read_text() for page in PAGES.values()}
    unknown = {name: metrics_in(text) - exported for name, text in texts.items()}
    assert {name: each for name, each in unknown.items() if each} == {}


def test_what_alerts_count_is_0_before_it_happens(page: str) -> None:
    """Prometheus sees a step only between two samples: a counter that begins with the first failure hides it. Those of
    a worker begin when the controller lists the worker."""
    recorded = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
    queries = [alert["expr"] for alert in ALERTS]
    queries += [expr for name, expr in recorded.items() if any(name in query for query in queries)]
    counted = re.findall(r"(?:rate|increase)\((tandem_\w+?_total)(?:{(.*?)})?\[", " ".join(queries))
    unseen = []
    for name, matchers in counted:
        matched = re.findall(r'(\w+)="(\w+)"', matchers)
        begun = [line for line in page.splitlines() if line.startswith(f"{name}{{") or line.startswith(f"{name} ")]
        if not any(all(f'{label}="{value}"' in line for label, value in matched) for line in begun):
            unseen.append((name, matchers))
    assert {name for name, _ in unseen} == {"tandem_worker_restarts_total"}
    assert len(counted) > 20


def test_every_metric_that_is_exported_is_explained(exported: frozenset[str]) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    named = metrics_in(page) | {each.removesuffix("_total") for each in metrics_in(page)}
    families = {
        each.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count").removesuffix("_total")
        for each in exported
        if each.startswith("tandem_")
    }
    assert sorted(families - named) == []


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert sorted(names) == sorted(PAGES)
    table = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", (RUNBOOKS / "index.md").read_text(), re.MULTILINE)
    assert dict(table) == {alert["alert"]: alert["labels"]["severity"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_bad_what_and_where_to_read_on(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert (ROOT / notes["runbook_url"]).stem == alert["alert"]
    used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    recorded = " ".join(rule["expr"] for rule in RULES if rule.get("record", " ") in alert["expr"])
    by = {word for group in re.findall(r"by \(([^)]*)\)", alert["expr"] + recorded) for word in group.split(", ")}
    assert used - by - {"instance"} == set(), "labels that the alert does not have"


@pytest.mark.parametrize("name", PAGES)
def test_a_runbook_has_all_its_parts(name: str) -> None:
    text = PAGES[name].read_text()
    assert text.startswith(f"# {name}\n")
    assert "**What users see.**" in text
    assert re.findall(r"^## .*$", text, re.MULTILINE) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE))


def test_promtool_is_asked_whether_each_alert_fires() -> None:
    tests = [yaml.safe_load(path.read_text()) for path in (ROOT / "tests" / "data" / "prometheus").glob("*.yaml")]
    cases = [case for file in tests for test in file["tests"] for case in test["promql_expr_test"]]
    firing = " ".join(case["expr"] + str(case["exp_samples"]) for case in cases if case["exp_samples"])
    fired = set(re.findall(r'alertname="(\w+)"', firing))
    assert fired == {alert["alert"] for alert in ALERTS}
