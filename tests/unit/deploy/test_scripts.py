"""The project's own scripts: bans, generated pages, set-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"


def run_script(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(argument) for argument in arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


@pytest.mark.acceptance(44, soak="bans; also a step of `make check`")
@pytest.mark.soak_only  # a step of `make check`, which CI runs beside the tests
def test_no_product_module_does_what_is_banned() -> None:
    result = run_script(sys.executable, SCRIPTS / "check-bans.py")
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import pickle", "imports pickle"),
        ("import cloudpickle as cp", "imports cloudpickle"),
        ("from dill import loads", "imports from dill"),
        ("from torch import load", "imports torch.load"),
        ("torch.load(path)", "calls torch.load"),
        ("eval(text)", "calls eval"),
        ("exec(text)", "calls exec"),
        ("yaml.load(text)", "calls yaml.load"),
        ("dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("server.bind('0.0.0.0:80')", "wildcard"),
        ("host = '::'", "wildcard"),
    ],
)
def test_a_banned_line_is_found_and_named(tmp_path: Path, line: str, said: str) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"x = 1\n{line}\n")
    result = run_script(sys.executable, SCRIPTS / "check-bans.py", module)
    assert result.returncode == 1
    assert re.search(rf":2: .*{re.escape(said)}", result.stdout), result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "'''eval and 0.0.0.0 in prose'''",
        "np.load(p, allow_pickle=False)",
        "json.loads(text)",
        "if host == '0.0.0.0': pass  # ban-ok: refuses it",
    ],
)
def test_a_harmless_line_passes(tmp_path: Path, line: str) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"{line}\n")
    result = run_script(sys.executable, SCRIPTS / "check-bans.py", module)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.soak_only  # likewise
@pytest.mark.parametrize(
    "script",
    [
        "generate-config-doc.py",
        "generate-chart-readme.py",
        "generate-chart-schema.py",
        "generate-api-pages.py",
        "generate-quickstart.py",
        "generate-router-requirements.py",
    ],
)
def test_generated_pages_are_fresh(script: str) -> None:
    result = run_script(sys.executable, SCRIPTS / script, "--check")
    assert result.returncode == 0, result.stderr


def test_setup_without_a_fitting_python_says_so_in_one_line() -> None:
    result = run_script("sh", SCRIPTS / "setup.sh", "runtime", "unused-venv", env={"PYTHON": "false"})
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "expected Python 3.11" in result.stderr
    assert not (ROOT / "unused-venv").exists()


def test_the_development_tools_ask_for_no_other_protobuf_than_users_get() -> None:
    """What `make test` tests is what `make demo` installs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    wanted = [Requirement(each) for each in [*dependencies, *(requires("grpcio-tools") or ())]]
    ours, tools = (each.specifier for each in wanted if each.name == "protobuf")
    versions = ["6.31.1", "6.33.6", "7.0.0", "7.36.2", "8.0.0"]
    assert list(ours.filter(versions)) == list(tools.filter(versions)) == ["6.31.1", "6.33.6"]


def test_make_help_lists_the_two_commands() -> None:
    result = run_script("make", "--no-print-directory", "help")
    assert "make demo" in result.stdout
    assert "make test" in result.stdout


def test_make_sets_up_once_and_again_only_when_pyproject_changes(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    log = tmp_path / "log"
    setup = tmp_path / "scripts" / "setup.sh"
    setup.write_text(f'#!/bin/sh\nmkdir -p "$2"; touch "$2/.stamp-$1"; echo "$1" >> {log}\n')
    setup.chmod(0o755)
    (tmp_path / "scripts" / "constraints.txt").touch()
    pyproject = tmp_path / "pyproject.toml"
    pyproject.touch()

    def setup_runs() -> int:
        subprocess.run(["make", "--silent", "setup"], cwd=tmp_path, check=True)
        return len(log.read_text().splitlines())

    assert [setup_runs(), setup_runs()] == [1, 1]
    later = pyproject.stat().st_mtime + 10
    os.utime(pyproject, (later, later))
    assert setup_runs() == 2


def test_ci_runs_the_readmes_commands() -> None:
    run, wheel = ((ROOT / name).read_text() for name in (".ci/run", "scripts/check-wheel.sh"))
    lines = run.splitlines()
    assert {"make check", "make check-wheel"} <= {*lines}
    assert any(line.startswith("make test-all") for line in lines)
    for command in ("tandem --help", "tandem doctor --help"):
        assert command in wheel
