"""A real Prometheus reads a real cluster under load: every query of the dashboards and every rule finds data there."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from cluster.spec.resolve import free_ports
from deploy.grafana.dashboards import DASHBOARDS
from tandem.testing.models import write_tiny_llama

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.system]

ROOT = Path(__file__).resolve().parents[2]
RULES_FILE = ROOT / "helm" / "tandem" / "files" / "alerts" / "tandem.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
VARIABLES = {"$__rate_interval": "30s", "$namespace": ".*", "$job": ".*", "$model": ".*"}
LOAD_S = 12.0
# What a cluster in which nothing fails does not have.
MAY_BE_EMPTY = {"tandem_retries_total"}

ENGINE = {"kv_blocks": 512, "host_kv_memory_bytes": 1 << 20}
SPEC: dict[str, Any] = {
    "control": {"backend": "subprocess"},
    "observability": {
        "cost": {"per_rank_hour": 2.0},
        "tracing": {"otlp_endpoint": "http://127.0.0.1:1", "sample_ratio": 1.0},  # nobody listens: traces are lost
    },
    "router": {
        "disaggregation": "always",
        "max_prefill_tokens_in_flight": 64,  # so that requests wait, and some are refused
        "max_queued_requests": 4,
        "classes": [{"name": "standard", "ttft_slo_s": 60.0}, {"name": "tight", "ttft_slo_s": 0.001}],
    },
}


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30.0).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series; those that are not a number are none."""
        found = self.get("query", query=expr)["result"]
        samples = [(each["metric"], float(each["value"][1])) for each in found]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def wait(self, expr: str, timeout_s: float = 90.0) -> None:
        """Until it finds something."""
        deadline = time.monotonic() + timeout_s
        while not self.query(expr):
            assert time.monotonic() < deadline, f"Prometheus finds nothing for {expr}"
            time.sleep(0.2)


@pytest.fixture
def start_prometheus(tmp_path: Path) -> Iterator[Callable[[str], Prometheus]]:
    """`start_prometheus("127.0.0.1:8000")` scrapes that target every second and evaluates the rules as often."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(target: str) -> Prometheus:
        rules = tmp_path / "rules.yaml"
        rules.write_text(re.sub(r"interval: \d+s", "interval: 1s", RULES_FILE.read_text()))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "tandem", "static_configs": [{"targets": [target]}]}],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (port,) = free_ports("127.0.0.1")
        address = f"127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        with (tmp_path / "prometheus.log").open("wb") as log:
            listen = [f"--web.listen-address={address}", "--log.level=warn"]
            processes.append(subprocess.Popen([*command, *listen], stdout=log, stderr=log))
        for _ in range(600):
            try:
                if httpx.get(f"http://{address}/-/ready", timeout=1.0).status_code == 200:
                    return Prometheus(f"http://{address}")
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise RuntimeError((tmp_path / "prometheus.log").read_text()[-4000:])

    yield start
    for process in processes:
        process.terminate()
        process.wait(60.0)


def send_load(cluster: Cluster, seconds: float) -> None:
    """Short and long prompts, some of them again and again, some of a class whose objective nobody can meet."""
    ends_s = time.monotonic() + seconds
    numbers = itertools.count()

    def client() -> None:
        with httpx.Client(base_url=cluster.base_url, timeout=30.0) as http:
            while time.monotonic() < ends_s:
                number = next(numbers)
                prompt = [3 + (number % 3)] * 96 if number % 2 else [3 + (number * at) % 200 for at in range(1, 80)]
                headers = {"x-tandem-priority": "tight"} if number % 5 == 0 else {}
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 8}
                http.post("/v1/completions", json=body, headers=headers)
            http.post("/v1/completions", json={"model": "tiny"})

    clients = [threading.Thread(target=client) for _ in range(12)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def filled_in(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


def may_be_empty(expr: str) -> bool:
    return any(metric in expr for metric in MAY_BE_EMPTY)


@pytest.fixture
def prometheus(
    tmp_path: Path, cluster_with: Callable[..., Cluster], start_prometheus: Callable[[str], Prometheus]
) -> Iterator[Prometheus]:
    """It has seen a cluster at work."""
    model = {"source": str(write_tiny_llama(tmp_path / "model")), "name": "tiny", "engine": ENGINE}
    cluster = cluster_with("--name", "watched", spec=SPEC | {"models": [model]})
    prometheus = start_prometheus(f"127.0.0.1:{cluster.http_port}")
    prometheus.wait("tandem_workers")
    send_load(cluster, LOAD_S)
    prometheus.wait("tandem:ttft_seconds:p99")
    yield prometheus
    cluster.assert_conserved()


def test_every_query_finds_data(prometheus: Prometheus) -> None:
    empty, unlabelled = [], []
    for name, dashboard in DASHBOARDS.items():
        for panel in (panel for row in dashboard.rows for panel in row.panels):
            for query in panel.queries:
                found = prometheus.query(filled_in(query.expr))
                if not found and not may_be_empty(query.expr):
                    empty.append(f"{name}, {panel.title}: {query.expr}")
                names = re.findall(r"{{(\w+)}}", query.legend)
                missing = {label for labels, _ in found for label in names if label not in labels}
                unlabelled += [f"{name}, {panel.title}: {label}" for label in missing]
    for rule in RULES:
        found = prometheus.query(rule["expr"])
        if "record" in rule and not (found and prometheus.query(rule["record"])):
            empty.append(rule["record"])
    assert empty == [], "\n".join(empty)
    assert unlabelled == [], "legends that name a label which is not there"
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) == len(RULES)
    assert [alert["labels"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"] == []
