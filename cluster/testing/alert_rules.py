"""The alert rules, asked by promtool what fires from a recording."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.testing.scraper import Recording, shown

RULE_FILES = sorted((Path(__file__).resolve().parents[2] / "helm" / "tandem" / "files" / "alerts").glob("*.yaml"))
NAMESPACE, RELEASE = "serving", "test-tandem"  # of recordings
EVALUATED_S = 30
_EVER = 'group by (alertname) (last_over_time(ALERTS{alertstate="firing"}[30d]))'
_NAME = re.compile(r"\b[A-Za-z_:][A-Za-z0-9_:]*\b")
_STRING = re.compile(r'"[^"]*"')

Group = Mapping[str, Any]


def groups_of(files: Iterable[Path]) -> list[Group]:
    """As the chart renders them for a release."""
    texts = (path.read_text() for path in files)
    named = (text.replace("RELEASE_NAMESPACE", NAMESPACE).replace("RELEASE_NAME", RELEASE) for text in texts)
    return [group for text in named for group in yaml.safe_load(text)["groups"]]


def alerts_of(groups: Iterable[Group]) -> list[Mapping[str, Any]]:
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def metrics_of(groups: Sequence[Group]) -> frozenset[str]:
    """Names of the metrics that alerts read, also through recorded ones."""
    recorded = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}
    open_, names = [alert["expr"] for alert in alerts_of(groups)], set[str]()
    while open_:
        words = set(_NAME.findall(_STRING.sub("", open_.pop()))) - names
        open_ += [recorded[word] for word in words & recorded.keys()]
        names |= words
    return frozenset(names - recorded.keys())


def fired(recording: Recording, groups: Sequence[Group], folder: Path) -> tuple[str, ...]:
    """Every alert that fires at some time from the first scrape to the last. Raises RuntimeError: promtool fails."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [dict(group) for group in groups]}))
    end_s = int((recording.scrapes - 1) * recording.interval_s)
    asked = {"expr": _EVER, "eval_time": f"{end_s}s", "exp_samples": []}
    case = {
        "interval": f"{recording.interval_s:g}s",
        "input_series": [{"series": shown(key), "values": values} for key, values in recording.series.items()],
        "promql_expr_test": [asked],
    }
    (folder / "case.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": f"{EVALUATED_S}s", "tests": [case]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", folder / "case.yaml"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ()
    _, got, found = (done.stdout + done.stderr).partition("got:")
    if not got:
        raise RuntimeError(done.stdout + done.stderr)
    return tuple(sorted(set(re.findall(r'alertname=\\?"(\w+)', found))))
