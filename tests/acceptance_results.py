"""With --acceptance-results, notes how the acceptance tests of a run ended, for docs/acceptance.md."""

from __future__ import annotations

import datetime
import os
import tomllib
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "data" / "acceptance-results.toml"
HEAD = "# How the acceptance tests last ended. Written by `make test-all ARGS=--acceptance-results`, `make soak` too.\n"


def named(nodeid: str) -> str:
    """FILE::FUNCTION, as the page names tests: without class, parameters, and the group that workers share."""
    file, *_, function = nodeid.partition("[")[0].partition("@")[0].split("::")
    return f"{file}::{function}"


class AcceptanceResults:
    """Runs in the process that starts the others, which gets the reports of all of them."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self._ends: dict[str, str] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not any(name == "acceptance" for name, _ in report.user_properties):
            return
        test = named(report.nodeid)
        if report.failed:
            self._ends[test] = "failed"
        elif report.when == "call" and report.passed:
            self._ends.setdefault(test, "passed")

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        size = "soak" if os.environ.get("TANDEM_SOAK") else "here"
        noted = tomllib.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        for test, end in self._ends.items():
            noted.setdefault(test, {})[size] = f"{end} {datetime.date.today()}"
        lines = [HEAD]
        for test, sizes in sorted(noted.items()):
            lines.append(f'\n["{test}"]\n' + "".join(f'{each} = "{end}"\n' for each, end in sorted(sizes.items())))
        self._path.write_text("".join(lines), encoding="utf-8")
