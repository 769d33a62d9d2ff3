"""Running clusters are found; dead ones are forgotten."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import state_file
from tandem.errors import ConfigError, UnavailableError


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def mine(name: str = "tandem") -> state_file.ClusterState:
    return state_file.this_process(name, admin="a:1", http="h:2", grpc="g:3")


def test_a_running_cluster_is_found_and_refuses_a_second() -> None:
    with state_file.written(mine()):
        assert state_file.find(None).admin == "a:1"
        with pytest.raises(ConfigError, match=str(os.getpid())):
            state_file.refuse_second("tandem")
        state_file.refuse_second("another")
    with pytest.raises(ConfigError, match="tandem up"):
        state_file.find(None)


def test_a_cluster_that_starts_is_told_apart_from_none() -> None:
    with state_file.written(state_file.starting("newcomer")):
        for name in (None, "newcomer"):
            with pytest.raises(UnavailableError, match="newcomer is still starting"):
                state_file.find(name)
        with pytest.raises(ConfigError, match="'newcomer' is starting"):
            state_file.refuse_second("newcomer")
        with state_file.written(mine("newcomer")):
            assert state_file.find(None).admin == "a:1"


def test_a_name_that_no_cluster_has_is_answered_with_those_there_are() -> None:
    with (
        state_file.written(mine("newcomer")),
        pytest.raises(ConfigError, match="expected a running cluster, got 'nope'; running: newcomer"),
    ):
        state_file.find("nope")


def test_what_a_dead_process_left_is_forgotten() -> None:
    with state_file.written(replace(mine(), started=1.0)):  # the pid now belongs to somebody else
        assert state_file.read("tandem") is None
        assert not (state_file.state_dir() / "tandem.json").exists()


def test_a_broken_file_is_forgotten() -> None:
    state_file.state_dir().mkdir(parents=True)
    (state_file.state_dir() / "tandem.json").write_text("{")
    assert state_file.read("tandem") is None


def test_with_several_clusters_one_must_be_named() -> None:
    with state_file.written(mine("a")), state_file.written(mine("b")):
        with pytest.raises(ConfigError, match="a, b"):
            state_file.find(None)
        assert state_file.find("b").name == "b"
