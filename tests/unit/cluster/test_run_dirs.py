"""Private folders: the user's alone, short, and rid of what killed processes left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.run_dirs import UNIX_PATH_BYTES, private_base, run_base, sweep
from tandem.errors import ConfigError


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one: pytest's own folders may be longer than a unix socket's path may be."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_folder_is_the_users_alone(runtime: Path) -> None:
    base = private_base()
    assert base == runtime / "tandem"
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_enter_is_refused(runtime: Path) -> None:
    (runtime / "tandem").mkdir()
    (runtime / "tandem").chmod(0o755)
    with pytest.raises(ConfigError, match="only you can access"):
        private_base()


def test_a_link_to_somewhere_else_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "tandem").symlink_to(runtime / "elsewhere")
    with pytest.raises(ConfigError, match="only you can access"):
        private_base()


def test_a_path_too_long_for_sockets_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / ("x" * UNIX_PATH_BYTES)))
    with pytest.raises(ConfigError, match="too long"):
        run_base("tandem")


def test_what_dead_processes_left_is_removed_and_nothing_else(runtime: Path) -> None:
    gone, alive, other = f"tandem-{dead_pid()}", f"tandem-{os.getppid()}", "notes"
    for name in (gone, alive, other):
        (runtime / name / "redis").mkdir(parents=True)
    sweep(runtime)
    assert {path.name for path in runtime.iterdir()} == {alive, other}


def test_a_killed_process_that_nobody_waited_for_counts_as_dead(runtime: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.read()  # it has closed its output, and is a zombie in a moment
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (runtime / f"tandem-{process.pid}").mkdir()
    sweep(runtime)
    assert list(runtime.iterdir()) == []
    process.wait()


def test_a_predecessor_with_our_pid_is_no_obstacle(runtime: Path) -> None:
    (private_base() / f"tandem-{os.getpid()}" / "router").mkdir(parents=True)
    assert not run_base("tandem").exists()
