"""The alert rules, by Prometheus's own tool: well formed, each fires when it should and not when it should not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "helm" / "tandem" / "files" / "alerts" / "tandem.yaml"
CASES = sorted((ROOT / "tests" / "data" / "prometheus").glob("*.yaml"))

pytestmark = pytest.mark.system


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_rules_do_what_they_should(case: Path) -> None:
    promtool("test", "rules", case)
