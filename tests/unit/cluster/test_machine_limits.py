"""A machine without open files or disk left: refused at the start, by name, and found by the doctor."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from cluster.cli.machine_limits import LEAST_FILES, check_disks, check_open_files
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

Usage = namedtuple("Usage", "total used free")  # of shutil.disk_usage


def limit_files(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (min(64, hard), hard))


def test_too_few_open_files_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_files(monkeypatch, LEAST_FILES - 1)
    with pytest.raises(ConfigError, match=r"open files: expected a limit of at least 512 .*, got 511: .*ulimit -n"):
        check_open_files(ClusterSpec())


@pytest.mark.parametrize(
    ("hard", "text"),
    [
        (LEAST_FILES, "a router holds about 256 connections, fewer than router.max_connections allows"),
        (1 << 20, "1048576 for each process"),
        (resource.RLIM_INFINITY, "unlimited"),
    ],
)
def test_enough_open_files_are_told_with_what_they_suffice_for(
    monkeypatch: pytest.MonkeyPatch, hard: int, text: str
) -> None:
    if hard != resource.RLIM_INFINITY:
        limit_files(monkeypatch, hard)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda what: (64, hard))
    assert text in check_open_files(ClusterSpec())


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_RUNTIME_DIR"])
@pytest.mark.acceptance(24, here="disk, at the start")
def test_a_full_disk_is_refused_by_the_variable_that_moves_the_folder(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    assert "MiB free in" in check_disks()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1 << (20 if variable in str(path) else 40)))
    with pytest.raises(
        ConfigError, match=rf"{variable}: expected at least 64 MiB free in \S*{variable}\S*, got 1: free"
    ):
        check_disks()


@pytest.mark.acceptance(24, here="descriptors, at the start")
def test_a_start_with_64_open_files_ends_at_once_and_names_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster", "up", "--backend", "subprocess", "--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "up", *command],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "open files: expected a limit of at least 512 for each process, got 64" in done.stderr
