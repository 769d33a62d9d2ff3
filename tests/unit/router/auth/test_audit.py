"""The audit file may be moved, removed or unwritable at any time, and no call waits for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from router.auth import audit
from router.auth.audit import AuditLine, AuditLog, utc_now


def line(number: int) -> AuditLine:
    return AuditLine(utc_now(), f"r{number}", "", "k", "acme", "::1", "GET /x", "tiny", "ok", None, 1, 2, 0.5)


def written(log: AuditLog, path: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") != count:
        assert time.monotonic() < deadline_s, path.read_bytes() if path.exists() else "no file"
        time.sleep(0.01)


def test_a_moved_removed_or_emptied_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path))
    log.write(line(1))
    written(log, path, 1)
    path.rename(tmp_path / "audit.jsonl.1")
    log.write(line(2))
    written(log, path, 1)
    path.unlink()
    log.write(line(3))
    written(log, path, 1)
    os.truncate(path, 0)
    log.write(line(4))
    log.close()
    assert b'"r4"' in path.read_bytes()
    assert not path.read_bytes().startswith(b"\0")
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_routers_lines_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    logs = [AuditLog(str(path)) for _ in range(2)]
    for number in range(2000):
        logs[number % 2].write(line(number))
    for log in logs:
        log.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 2000
    assert all(each.startswith(b'{"time":') and each.endswith(b"}") for each in lines)


def test_a_missing_folder_is_logged_once_and_writing_resumes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "audit.jsonl"
    log = AuditLog(str(path))
    path.unlink()
    folder.rmdir()
    log.write(line(0))
    deadline_s = time.monotonic() + 60
    while "lines are lost" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for number in range(1, 4):
        log.write(line(number))
    folder.mkdir()
    log.write(line(9))
    log.close()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    lost = re.search(r"written again; (\d+) lines were lost", caplog.text)
    assert lost
    assert int(lost[1]) >= 1
    assert int(lost[1]) + path.read_bytes().count(b"\n") == 5
    with pytest.raises(OSError, match="No such file"):
        AuditLog(str(tmp_path / "nowhere" / "x"))


def test_a_disk_that_hangs_delays_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_WAITING", 100)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(str(pipe))
    for number in range(5000):  # more than a pipe holds and nothing reads: a write that waited would wait for ever
        log.write(line(number))
    os.close(reader)
    log.close()


def test_lines_can_go_to_stdout() -> None:
    program = (
        "from router.auth.audit import *\n"
        "log = AuditLog('stdout')\n"
        "log.write(AuditLine(utc_now(), 'r', '', 'k', 't', '', 'm', '', 'ok', None, 0, 0, 0.0))\n"
        "log.close()\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=30).stdout
    assert told.count(b"\n") == 1
