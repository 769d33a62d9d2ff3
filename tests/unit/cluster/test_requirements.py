"""A pod names the Secret, certificate or model volume that it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.requirements import check_requirements
from tandem.errors import ConfigError

KEYS = {"value": "auth.existingSecret", "what": "Secret tandem-keys with keys.yaml"}
TOKEN = {"value": "models.hubTokenSecret", "what": "Secret hub with token", "variable": "HF_TOKEN"}


def listed(folder: Path, *requirements: dict[str, str]) -> dict[str, str]:
    path = folder / "requirements.yaml"
    path.write_text(yaml.safe_dump(list(requirements)))
    return {"TANDEM_REQUIREMENTS": str(path)}


def test_nothing_is_required_where_nobody_says_so() -> None:
    assert check_requirements({}) == ()


def test_what_is_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").touch()
    environ = listed(tmp_path, KEYS | {"path": str(tmp_path / "keys.yaml")}, TOKEN) | {"HF_TOKEN": "secret"}
    assert check_requirements(environ) == (KEYS["what"], TOKEN["what"])


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        check_requirements(listed(tmp_path, KEYS | {"path": "/none/keys.yaml"}, TOKEN))
    assert raised.value.field == "auth.existingSecret"
    for part in ("Secret tandem-keys with keys.yaml at /none/keys.yaml", "Secret hub with token", "HF_TOKEN"):
        assert part in raised.value.message


@pytest.mark.parametrize("text", ["{", "- 1", "- {value: a, what: b}", "- {value: a, what: b, path: c, variable: d}"])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "requirements.yaml").write_text(text)
    with pytest.raises(ConfigError, match="expected a list of requirements"):
        check_requirements({"TANDEM_REQUIREMENTS": str(tmp_path / "requirements.yaml")})


@pytest.mark.parametrize("command", ["up", "doctor"])
def test_up_and_doctor_say_the_same_and_up_leaves_it_where_kubernetes_looks(tmp_path: Path, command: str) -> None:
    log = tmp_path / "termination-log"
    environ = listed(tmp_path, KEYS | {"path": "/none/keys.yaml"}) | {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TANDEM_TERMINATION_LOG": str(log),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "cluster", command], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == (2 if command == "up" else 1)
    expected = "auth.existingSecret: expected Secret tandem-keys with keys.yaml at /none/keys.yaml, and it is missing"
    assert expected in (done.stdout if command == "doctor" else done.stderr)
    assert not log.exists() if command == "doctor" else expected in log.read_text()
