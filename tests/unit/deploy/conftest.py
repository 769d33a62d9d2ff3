"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "tandem"
QUICK = {"GOGC": "off"}  # helm ends before a collection of its garbage pays

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]


@pytest.fixture(scope="session")
def helm() -> str:
    found = subprocess.run([ROOT / "scripts" / "fetch-helm.sh"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def parse(text: str) -> Manifests:
    manifests = [manifest for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest]
    found = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    assert len(found) == len(manifests), "two objects of one kind and name"
    return found


@pytest.fixture(scope="session")
def render(helm: str) -> Callable[..., Manifests]:
    """`render("--set", "a=b")`: (kind, name) → manifest of `helm template`."""

    @functools.cache
    def text(*arguments: str) -> str:
        command = [helm, "template", "test", str(CHART), "--namespace", "serving", *arguments]
        result = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | QUICK)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return lambda *arguments: parse(text(*arguments))


@pytest.fixture(scope="session")
def refusal(helm: str) -> Callable[..., str]:
    """What `helm template` says to values that it refuses."""

    def run(*arguments: str) -> str:
        command = [helm, "template", "test", str(CHART), "--namespace", "serving", *arguments]
        result = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | QUICK)
        assert result.returncode != 0, "expected the values to be refused"
        return result.stderr

    return run


@pytest.fixture(scope="session", params=[None, *sorted((CHART / "examples").glob("*.yaml"))],
                ids=lambda path: path.stem if path else "defaults")  # fmt: skip
def example(request: pytest.FixtureRequest, render: Callable[..., Manifests]) -> Manifests:
    """Every example, rendered."""
    return render(*(["--values", str(request.param)] if request.param else []))
