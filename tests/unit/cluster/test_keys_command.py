"""`tandem keys`: what it prints, what it writes, and what it says to mistakes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.commands.doctor import _auth
from cluster.cli.main import app
from cluster.spec.resolve import check_auth
from router.auth.api_keys import KeyTable
from router.auth.keys_file import read_keys
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def run(path: Path, *args: str) -> Result:
    return CliRunner().invoke(app, ["keys", *args], env={"TANDEM_SECURITY__AUTH__KEYS_FILE": str(path)})


def made(result: Result) -> str:
    assert result.exit_code == 0, result.output
    key = result.stdout.strip()
    assert re.fullmatch(r"tdm_[0-9a-f]{12}_[\w-]{43}", key), "the key alone, for scripts"
    return key


def good(path: Path, key: str) -> bool:
    return KeyTable(read_keys(path)).principal(key, time.time()) is not None


def test_a_key_from_its_making_to_its_end(path: Path) -> None:
    key = made(run(path, "create", "--tenant", "acme", "--requests-per-minute", "60", "--model", "m", "--admin"))
    key_id = key.split("_")[1]
    assert good(path, key)
    (shown,) = json.loads(run(path, "list", "--json").stdout)
    assert (shown["id"], shown["tenant"], shown["models"], shown["admin"]) == (key_id, "acme", ["m"], True)
    assert shown["limits"]["requests_per_minute"] == 60
    assert "sha256" not in str(shown)
    assert key_id in run(path, "list").stdout

    rotated = made(run(path, "rotate", key_id, "--grace", "1h"))
    assert rotated.split("_")[1] == key_id
    assert good(path, key)
    assert good(path, rotated)
    at_once = made(run(path, "rotate", key_id, "--grace", "0s", "--expires-in", "90d"))
    assert [good(path, each) for each in (key, rotated, at_once)] == [False, False, True]

    assert run(path, "revoke", key_id).exit_code == 0
    assert not good(path, at_once)
    assert json.loads(run(path, "list", "--json").stdout) == []


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["create", "--tenant", "a b"], "--tenant"),
        (["create", "--tenant", "a", "--expires-in", "soon"], "--expires-in"),
        (["rotate", "000000000000"], "id"),
        (["revoke", "../../etc"], "id"),
    ],
)
def test_mistakes_are_named(path: Path, args: list[str], named: str) -> None:
    made(run(path, "create", "--tenant", "acme"))
    before = path.read_bytes()
    refused = run(path, *args).exception
    assert refused is not None
    assert str(refused).startswith(f"{named}: ")
    assert path.read_bytes() == before


def test_a_start_without_its_keys_is_refused_before_anything_runs(path: Path) -> None:
    spec = ClusterSpec.model_validate({"security": {"auth": {"keys_file": str(path)}}})
    with pytest.raises(ConfigError, match=r"security\.auth\.keys_file.*tandem keys create"):
        check_auth(spec)
    made(run(path, "create", "--tenant", "acme"))
    assert _auth(spec) == "API keys"


def test_a_start_whose_audit_log_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    auth: dict[str, object] = {"audit_log": str(tmp_path / "logs" / "audit.jsonl"), "audit_chained": True}
    with pytest.raises(ConfigError, match=r"audit_log: cannot write to \S+/logs: create the folder"):
        check_auth(ClusterSpec.model_validate({"security": {"auth": auth}}))
    (tmp_path / "logs").mkdir()
    check_auth(ClusterSpec.model_validate({"security": {"auth": auth}}))
    assert not list((tmp_path / "logs").iterdir()), "looking makes no file"
    auth["audit_key_file"] = str(tmp_path / "key")
    with pytest.raises(ConfigError, match=r"security\.auth\.audit_key_file: cannot read"):
        check_auth(ClusterSpec.model_validate({"security": {"auth": auth}}))


def test_a_list_in_a_pipe_is_as_wide_as_its_words(path: Path) -> None:
    note = "of the batch jobs that run each night " * 5
    made(run(path, "create", "--tenant", "acme", "--note", note))
    assert note.strip() in run(path, "list").stdout
