"""What the end of a local Ray kills: processes that write to files of its session, and nobody who looks at them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.backends import ray_orphans

HOLD = "import os, sys, time; os.open(sys.argv[1], getattr(os, sys.argv[2])); print(flush=True); time.sleep(60)"
HEAD = 4711


@pytest.fixture
def holders() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def holder(stack: ExitStack, path: Path, mode: str) -> subprocess.Popen[bytes]:
    """A process that has `path` open."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), mode], stdout=subprocess.PIPE)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_writers_of_the_session_are_killed_and_nobody_else(tmp_path: Path, holders: ExitStack) -> None:
    """The keeper removes the folder when the head has ended, and a user may follow a log."""
    logs = {}
    for name, head in (("ours", HEAD), ("other", HEAD + 1)):
        logs[name] = tmp_path / f"session_2026-01-01_{head}" / "raylet.out"
        logs[name].parent.mkdir()
        logs[name].touch()
    writer = holder(holders, logs["ours"], "O_WRONLY")
    spared = [
        holder(holders, logs["ours"], "O_RDONLY"),
        holder(holders, logs["ours"].parent, "O_RDONLY"),  # as rmtree has it
        holder(holders, logs["other"], "O_WRONLY"),
    ]
    command = [sys.executable, "-I", "-S", ray_orphans.__file__, str(tmp_path), str(HEAD), "1"]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
    holders.enter_context(watcher)
    holders.callback(watcher.kill)
    assert watcher.stdin is not None
    assert writer.poll() is None
    watcher.stdin.close()  # the head has ended
    assert writer.wait(60) == -signal.SIGKILL
    assert [each.poll() for each in spared] == [None, None, None]


def test_children_of_the_keeper_end_by_themselves(tmp_path: Path, holders: ExitStack) -> None:
    log = tmp_path / f"session_2026-01-01_{HEAD}" / "raylet.out"
    log.parent.mkdir()
    log.touch()
    child = holder(holders, log, "O_WRONLY")
    session = rf"{tmp_path}/session_[^/]*_{HEAD}/"
    assert child.pid in ray_orphans.pids_of(session, keeper=1)
    assert child.pid not in ray_orphans.pids_of(session, keeper=os.getpid())
