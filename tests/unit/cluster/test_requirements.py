"""A pod names the Secret, certificate or model volume that it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.spec.requirements import check_requirements
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is not YAML"),
        ("a: b", "the file: expected a valid list"),
        ("- {value: a, what: b, path: c}\n- {value: a, path: c}", "entry 2, what: field required"),
        ("- {value: a, what: b}", "entry 1: expected either path or variable"),
        ("- {value: a, what: b, path: c, variable: d}", "entry 1: expected either path or variable"),
        (None, "No such file or directory"),
    ],
)
def test_a_list_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "requirements.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        check_requirements({"TANDEM_REQUIREMENTS": str(path)})
    said = f"TANDEM_REQUIREMENTS: expected the chart's list of requirements in {path}: {reason}; `helm upgrade`"
    assert raised.value.message == f"{said} writes it again"


@pytest.mark.parametrize("token", [None, "not-good-enough"])
def test_a_pull_that_the_hub_refuses_names_the_secret_of_its_token(tmp_path: Path, token: str | None) -> None:
    environ = listed(tmp_path, TOKEN) | {"HF_TOKEN": token or "", "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = tandem(tmp_path, environ, "pull", "org/gated")
    assert done.returncode == 2
    missing = ", which is missing" if token is None else ""
    assert done.stderr.endswith(f"; HF_TOKEN comes from models.hubTokenSecret (Secret hub with token{missing})\n")


@pytest.mark.parametrize("command", ["up", pytest.param("doctor", marks=pytest.mark.slow)])
def test_a_secret_is_missed_before_the_spec_that_needs_it_is_read(tmp_path: Path, command: str) -> None:
    """What the chart writes for an external Redis with internal TLS, where its Secret is missing."""
    secret = {"value": "redis.external.existingSecret", "what": "Secret r with url", "variable": "TANDEM_REDIS_URL"}
    spec = tmp_path / "cluster.yaml"
    tls = {name: f"/etc/tandem-tls/internal/{name}" for name in ("cert", "key", "ca")}
    redis = {"mode": "external", "url": "${TANDEM_REDIS_URL}"}
    spec.write_text(yaml.safe_dump({"redis": redis, "security": {"tls": tls}}))
    done = tandem(tmp_path, listed(tmp_path, secret), command, "--config", str(spec))
    assert done.returncode == 2
    said = done.stdout if command == "doctor" else done.stderr
    assert "redis.external.existingSecret: expected Secret r with url" in said


def tandem(folder: Path, environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[3])
    usual = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": root}
    command = [sys.executable, "-m", "cluster", *arguments]
    return subprocess.run(command, env=usual | environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", ["up", "doctor"])
@pytest.mark.slow
def test_up_and_doctor_say_the_same_and_up_leaves_it_where_kubernetes_looks(tmp_path: Path, command: str) -> None:
    log = tmp_path / "termination-log"
    environ = listed(tmp_path, KEYS | {"path": "/none/keys.yaml"}) | {"TANDEM_TERMINATION_LOG": str(log)}
    done = tandem(tmp_path, environ, command)
    assert done.returncode == (2 if command == "up" else 1)
    expected = "auth.existingSecret: expected Secret tandem-keys with keys.yaml at /none/keys.yaml, and it is missing"
    assert expected in (done.stdout if command == "doctor" else done.stderr)
    assert not log.exists() if command == "doctor" else expected in log.read_text()
