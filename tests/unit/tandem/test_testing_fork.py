"""A forked process ends, fails and is killed as a started one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.testing.fork import ForkServer

PROGRAM = """
import os, sys, time
if __name__ == "__main__":
    print("said", *sys.argv[1:], os.environ["WORD"], flush=True)
    if "fail" in sys.argv:
        raise ValueError("broken")
    if "hang" in sys.argv:
        time.sleep(600)
    sys.exit(7)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "some_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = ForkServer("some_program")
    yield server
    server.close()


def test_a_program_runs_with_its_arguments_and_environment_and_its_end_is_told(
    server: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    env = os.environ | {"WORD": "word"}
    assert server.start("some_program", ("a",), log, env).wait(60) == 7
    assert server.start("some_program", ("fail",), log, env).wait(60) == 1
    hangs = server.start("some_program", ("hang",), log, env)
    assert hangs.poll() is None
    hangs.send_signal(signal.SIGTERM)
    assert hangs.wait(60) == -signal.SIGTERM
    hangs.kill()  # nobody, any more
    text = log.read_text()
    assert text.startswith("said a word\n")
    assert "ValueError: broken" in text
