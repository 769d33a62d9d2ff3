"""The audit file may be moved, removed or unwritable at any time, and no call waits for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.config.auth import AuthSpec
from tandem.errors import UnavailableError
from tandem.telemetry import audit
from tandem.telemetry.audit import AuditLine, AuditLog, utc_now
from tandem.telemetry.audit_chain import verify
from tandem.testing.disks import SmallDisk


def line(number: int) -> AuditLine:
    return AuditLine(utc_now(), f"r{number}", "", "k", "acme", "::1", "GET /x", "tiny", "ok", None, 1, 2, 0.5)


def written(log: AuditLog, path: Path, lines: int) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") != lines:
        assert time.monotonic() < deadline_s, path.read_bytes() if path.exists() else "no file"
        time.sleep(0.01)


def told(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.01)


def until(works: Callable[[], None]) -> int:
    """Until it raises no UnavailableError; how often it did."""
    deadline_s = time.monotonic() + 60
    refused = 0
    while True:
        try:
            works()
        except UnavailableError:
            refused += 1
        else:
            return refused
        assert time.monotonic() < deadline_s
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
    told(caplog, "lines are lost")
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
        "from tandem.telemetry.audit import *\n"
        "log = AuditLog('stdout')\n"
        "log.write(AuditLine(utc_now(), 'r', '', 'k', 't', '', 'm', '', 'ok', None, 0, 0, 0.0))\n"
        "log.close()\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=30).stdout
    assert printed.count(b"\n") == 1


def admit_calls(log: AuditLog, numbers: Iterator[int]) -> None:
    """Until one is refused. A hundred lines at a time are more than the rest of a file's last page."""
    while True:
        log.require_room()
        for number in islice(numbers, 100):
            log.write(line(number))
        time.sleep(0.02)


@pytest.mark.acceptance(24, here="the audit log's disk, while serving")
@pytest.mark.parametrize("is_chained", [False, True])
def test_a_lossless_log_refuses_calls_on_a_full_disk_and_loses_no_line(
    disk: SmallDisk, is_chained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.path / "audit.jsonl"
    log = AuditLog.of(AuthSpec(audit_log=str(path), audit_lossless=True, audit_chained=is_chained), "router-0")
    assert log is not None
    log.write(line(0))
    written(log, path, 1 + is_chained)
    disk.fill()
    admitted = count(1)
    with pytest.raises(UnavailableError, match="audit_log: calls are refused while the audit log cannot be written"):
        admit_calls(log, admitted)
    made = next(admitted)
    assert f"calls are refused: cannot write to {path} (No space left on device): free space" in caplog.text
    assert path.read_bytes().endswith(b"}\n"), "no part of a line"
    disk.free()
    written(log, path, made + is_chained)
    late = until(log.require_room)  # the file is written a moment before calls are admitted
    log.close()
    refused = re.search(r"written again; (\d+) calls were refused", caplog.text)
    assert refused is not None
    assert 1 <= int(refused.group(1)) <= 1 + late
    lines = path.read_bytes().splitlines(keepends=True)
    numbers = [json.loads(each)["request_id"] for each in lines if b"request_id" in each]
    assert numbers == [f"r{number}" for number in range(made)]
    assert verify([("audit", lines)], None).broken is None or not is_chained


def test_a_chained_log_says_itself_how_many_lines_it_lost(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    path = disk.path / "audit.jsonl"
    log = AuditLog.of(AuthSpec(audit_log=str(path), audit_chained=True), "router-0")
    assert log is not None
    log.write(line(0))
    written(log, path, 2)
    disk.fill()
    for number in range(1, 101):
        log.write(line(number))
    told(caplog, "lines are lost")
    disk.free()
    log.write(line(101))
    log.close()
    assert "written again" in caplog.text
    lines = path.read_bytes().splitlines(keepends=True)
    found = verify([("audit", lines)], None)
    assert found.broken is None
    assert found.lost + sum(b"request_id" in each for each in lines) == 102
    assert found.lost > 0


def test_a_log_that_fails_says_so_once_however_many_calls_there_are(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.path / "audit.jsonl"
    log = AuditLog(str(path))
    disk.fill()
    for number in range(4):
        for _ in range(100):
            log.write(line(number))
        time.sleep(2 * audit.RETRY_S / 3)
    log.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "lines are lost: cannot write" in said[0]
    assert said[1] == "security.auth.audit_log: 400 lines were lost until the end"
    assert path.read_bytes() == b""


def test_a_line_that_a_killed_process_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"time":"20')
    log = AuditLog(str(path))
    log.write(line(1))
    log.close()
    cut, whole = path.read_bytes().splitlines()
    assert cut == b'{"time":"20'
    assert json.loads(whole)["request_id"] == "r1"


def test_a_log_that_need_not_open_at_once_opens_later(tmp_path: Path) -> None:
    path = tmp_path / "later" / "audit.jsonl"
    log = AuditLog.of(AuthSpec(audit_log=str(path), audit_lossless=True), "controller", must_open=False)
    assert log is not None
    with pytest.raises(UnavailableError):
        log.require_room()
    path.parent.mkdir()
    until(log.require_room)
    log.close()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"audit_lossless": True}, "audit_lossless: expected a file as security.auth.audit_log, got none"),
        ({"audit_log": "stdout", "audit_lossless": True}, "audit_lossless: expected a file .*, got stdout"),
        ({"audit_log": "stdout", "audit_chained": True}, "audit_chained: expected a file .*, got stdout"),
        ({"audit_log": "x", "audit_key_file": "k"}, "audit_key_file: expected together with .*audit_chained"),
    ],
)
def test_settings_that_could_not_be_kept_are_refused(fields: dict[str, object], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        AuthSpec.model_validate(fields)
