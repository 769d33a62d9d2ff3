"""A forked process ends, fails and is killed as a started one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    hangs.kill()  # it has ended: no signal is sent
    text = log.read_text()
    assert text.startswith("said a word\n")
    assert "ValueError: broken" in text


def test_a_process_has_the_folder_of_who_starts_it(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert server.start("some_program", (), Path("log"), os.environ | {"WORD": "here"}).wait(60) == 7
    assert (tmp_path / "log").read_text() == "said here\n"


def test_threads_that_poll_one_process_all_read_its_exit_code(server: ForkServer, tmp_path: Path) -> None:
    hangs = server.start("some_program", ("hang",), tmp_path / "log", os.environ | {"WORD": ""})
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(hangs.wait, 60) for _ in range(8)]
        hangs.kill()
        assert {each.result() for each in waiting} == {-signal.SIGKILL}


def test_the_answer_to_an_interrupted_call_is_not_taken_for_the_next(server: ForkServer, tmp_path: Path) -> None:
    hangs = server.start("some_program", ("hang",), tmp_path / "log", os.environ | {"WORD": ""})
    assert server._process.stdin is not None
    print(f'{{"number": 0, "poll": {hangs.pid}}}', file=server._process.stdin, flush=True)
    another = server.start("some_program", (), tmp_path / "log", os.environ | {"WORD": ""})
    assert another.pid > 1
    assert another.wait(60) == 7
    hangs.kill()
    assert hangs.wait(60) == -signal.SIGKILL


def test_a_server_that_is_gone_says_so(server: ForkServer) -> None:
    server._process.kill()
    server._process.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the fork server of some_program is gone"):
            server.call({"poll": 1})
