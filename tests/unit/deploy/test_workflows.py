"""Workflows that a fork copies: right by GitHub's schema, without what is insecure, and of commands that are there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted(path for path in (ROOT / "deploy").rglob("*.yaml") if "\njobs:\n" in path.read_text())
SCRIPTS = sorted((ROOT / "deploy").rglob("*.sh"))


def tool(name: str, *arguments: str | Path, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name(name), *arguments]
    return subprocess.run(command, input=said, check=False, capture_output=True, text=True, cwd=ROOT)


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_what_github_takes(workflow: Path) -> None:
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_nothing_that_zizmor_finds_insecure(workflow: Path) -> None:
    """Among others: an action that is not pinned by its commit, and text of others in a shell."""
    checked = tool("zizmor", "--offline", "--no-progress", workflow)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps_of(workflow):
        script = step.get("run", "")
        linted = tool("shellcheck", "--shell=bash", "-", said=script)
        assert linted.returncode == 0, linted.stdout
        assert set(re.findall(r"^make ([a-z-]+)", script, re.MULTILINE)) <= targets
        for name in re.findall(r"(?:^|[\s(])((?:scripts|deploy|helm|examples)/[\w./-]+)", script):
            assert (ROOT / name).exists(), name
        for name, command in re.findall(r"(deploy/[\w./-]+\.sh) ([\w-]+)", script):
            assert re.search(rf"^{command}\(\) \{{", (ROOT / name).read_text(), re.MULTILINE), f"{name} {command}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_has_nothing_that_shellcheck_finds(script: Path) -> None:
    linted = tool("shellcheck", script)
    assert linted.returncode == 0, linted.stdout


def test_the_workflow_on_kind_changes_what_restarts_no_pod_and_fits_its_machine(render: Callable[..., Any]) -> None:
    text = "\n".join(step.get("run", "") for step in steps_of(ROOT / "deploy" / "kind" / "kind.yaml"))
    commands = re.findall(r"^helm (?:install|upgrade) demo helm/tandem (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    installed, upgraded = (render(*_values(shlex.split(command))) for command in commands)
    assert installed["RayCluster", "test-tandem"] == upgraded["RayCluster", "test-tandem"]
    assert installed["ConfigMap", "test-tandem"] != upgraded["ConfigMap", "test-tandem"]
    (container,) = installed["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert float(container["resources"]["requests"]["cpu"]) < 2.9, (
        "of 4: Kubernetes' own pods and the operator request 1.1"
    )


def _values(words: list[str]) -> list[str]:
    """The options that choose values, of a helm command."""
    pairs = pairwise(words)
    return [each for pair in pairs if pair[0] in ("--values", "--set") for each in pair]
