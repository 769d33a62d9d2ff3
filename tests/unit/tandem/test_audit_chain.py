"""A chained audit log: every line that was altered, removed or moved is found, in files that real logs wrote."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.commands.audit import run_verify
from tandem.config.auth import AuthSpec
from tandem.errors import ConfigError, InputError
from tandem.telemetry.audit import AuditLine, AuditLog, utc_now
from tandem.telemetry.audit_chain import Verification, verify

KEY = b"k" * 32

Lines = list[bytes]


def line(number: int) -> AuditLine:
    return AuditLine(utc_now(), f"r{number}", "", "k", "acme", "::1", "GET /x", "tiny", "ok", None, 1, 2, 0.5)


def open_log(path: Path, writer: str = "router-0", key: Path | None = None) -> AuditLog:
    auth = AuthSpec(audit_log=str(path), audit_chained=True, audit_key_file=None if key is None else str(key))
    log = AuditLog.of(auth, writer)
    assert log is not None
    return log


def written(path: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def verified(*paths: Path, key: bytes | None = None) -> Verification:
    return verify([(path.name, path.read_bytes().splitlines(keepends=True)) for path in paths], key)


@pytest.fixture(params=["sha256", "hmac"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if request.param == "sha256":
        return None
    path = tmp_path / "audit.key"
    path.write_bytes(KEY + b"\n")
    return path


def test_what_two_routers_and_their_successors_wrote_is_intact(tmp_path: Path, key: Path | None) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        logs = [open_log(path, f"router-{number}", key) for number in range(2)]
        for number in range(400):
            logs[number % 2].write(line(number))
        for log in logs:
            log.close()
    found = verified(path, key=KEY if key else None)
    assert found.broken is None
    assert found.lines == 800 + 4 * 2, "and a header and an end for each start"
    assert len(found.segments) == 4
    assert found.notes() == []
    requests = [json.loads(each) for each in path.read_text().splitlines() if "request_id" in each]
    assert len(requests) == 800
    assert requests[0].keys() >= {"time", "method", "outcome", "segment", "number", "chain"}


def change(old: bytes, new: bytes) -> Callable[[Lines], None]:
    def changed(lines: Lines) -> None:
        lines[4] = lines[4].replace(old, new)

    return changed


def swap(lines: Lines) -> None:
    lines[4], lines[5] = lines[5], lines[4]


def cut(lines: Lines) -> None:
    lines[-1] = lines[-1][:-10]


BREAKS: dict[str, tuple[Callable[[Lines], object], int, str]] = {
    "altered": (change(b'"acme"', b'"evil"'), 5, "the line was altered"),
    "formatted anew": (change(b'"tenant":"acme"', b'"tenant": "acme"'), 5, "the line was altered"),
    "removed": (
        lambda lines: lines.pop(4),
        5,
        r"line 4 of segment \w+ \(router-0\), got its line 5: lines were removed",
    ),
    "header removed": (lambda lines: lines.pop(0), 1, "the header of segment"),
    "repeated": (lambda lines: lines.insert(4, lines[3]), 5, "got its line 3: lines were removed, repeated"),
    "reordered": (swap, 5, "got its line 5: lines were removed, repeated or reordered"),
    "added": (lambda lines: lines.insert(4, b'{"time":"now"}\n'), 5, "a whole line that ends with its"),
    "no object": (lambda lines: lines.insert(4, b'1,"chain":"x"}\n'), 5, "a JSON object"),
    "cut": (cut, 12, "a whole line"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_the_first_broken_line_is_told(
    tmp_path: Path, key: Path | None, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path, key=key)
    for number in range(10):
        log.write(line(number))
    log.close()
    assert run_verify([path], key) == 0
    assert "intact: 12 lines of 1 segment" in capsys.readouterr().out
    lines = path.read_bytes().splitlines(keepends=True)
    breaks, number, expected = BREAKS[case]
    breaks(lines)
    path.write_bytes(b"".join(lines))
    assert run_verify([path], key) == 1
    told = capsys.readouterr().out
    assert re.search(rf"broken: \S+audit.jsonl: line {number}: expected .*{expected}", told), told


def test_without_the_key_no_chain_can_be_made_anew(tmp_path: Path) -> None:
    path, key = tmp_path / "audit.jsonl", tmp_path / "key"
    key.write_bytes(KEY)
    forged = open_log(path)  # as who does not have the key would
    forged.write(line(1))
    forged.close()
    assert (broken := verified(path, key=KEY).broken) is not None
    assert (broken.line, broken.expected) == (
        1, "digest hmac-sha256, got sha256: another key or no key was used",
    )  # fmt: skip
    assert verified(path).broken is None
    path.unlink()
    log = open_log(path, key=key)
    log.write(line(1))
    log.close()
    other = verified(path, key=b"o" * 32).broken
    assert other is not None
    assert "or the key is another" in other.expected
    unkeyed = verified(path).broken
    assert unkeyed is not None
    assert "pass the key with --key-file" in unkeyed.expected


def test_a_segment_goes_on_in_the_file_after_a_rotation(tmp_path: Path, key: Path | None) -> None:
    path, older, zipped = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1", tmp_path / "audit.jsonl.2.gz"
    logs = [open_log(path, f"router-{number}", key) for number in range(2)]
    for turn in range(3):
        for number in range(6):
            logs[number % 2].write(line(number))
        written(path, 8)
        if turn == 0:
            zipped.write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        elif turn == 1:
            path.rename(older)
    for log in logs:
        log.close()
    assert run_verify([zipped, older, path], key) == 0
    secret = KEY if key else None
    assert verified(older, path, key=secret).broken is None
    notes = "\n".join(verified(path, key=secret).notes())
    assert notes.count("the earlier ones are in files not given here") == 2
    out_of_order = verified(path, older, key=secret).broken
    assert out_of_order is not None, "the older file comes first"


def test_a_log_that_is_emptied_in_place_begins_with_a_header_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    log.write(line(1))
    written(path, 2)
    os.truncate(path, 0)
    log.write(line(2))
    log.close()
    found = verified(path)
    assert found.broken is None
    assert "begins with its line 2" in found.notes()[0]


def test_lines_removed_from_the_end_are_told_as_far_as_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    for number in range(5):
        log.write(line(number))
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]))
    found = verified(path)
    assert found.broken is None, "what a process that was killed leaves looks the same"
    assert re.search(r"segment \w+ of router-0 has no end: .* lines after its line 3 were removed", found.notes()[0])


def test_lines_removed_from_the_end_of_a_log_that_goes_on_are_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    for number in range(3):
        log.write(line(number))
    written(path, 4)
    os.truncate(path, path.read_bytes().rstrip(b"\n").rindex(b"\n") + 1)
    log.write(line(4))
    log.close()
    broken = verified(path).broken
    assert broken is not None
    assert "got its line 4: lines were removed" in broken.expected


def test_a_whole_segment_that_was_removed_is_found_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for start in range(3):
        log = open_log(path)
        log.write(line(start))
        log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[6:]))
    broken = verified(path).broken
    assert broken is not None
    assert broken.line == 4
    assert "a header that follows the line before it here" in broken.expected


def test_a_process_that_is_killed_leaves_whole_lines_and_a_segment_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.unit.tandem.test_audit_chain import line, open_log\n"
        "log = open_log(Path(sys.argv[1]))\n"
        "while True: [log.write(line(n)) for n in range(100)]; time.sleep(0.01)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)]) as process:
        written(path, 500)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # no thread is in a write, which SIGKILL could cut
        process.send_signal(signal.SIGKILL)
    log = open_log(path)
    log.write(line(1))
    log.close()
    found = verified(path)
    assert found.broken is None
    assert [each.has_ended for each in found.segments.values()] == [False, True]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda path: path.write_bytes(b"short\n"), "--key-file: expected at least 32 bytes in .*, got 5: `openssl"),
        (lambda path: None, "--key-file: cannot read .*: No such file"),
    ],
    ids=["short", "missing"],
)
def test_a_key_that_cannot_be_used_is_named(tmp_path: Path, make: Callable[[Path], object], names: str) -> None:
    path = tmp_path / "key"
    make(path)
    with pytest.raises(ConfigError, match=names):
        run_verify([], path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken, damaged = tmp_path / "broken.gz", tmp_path / "damaged.gz"
    whole = gzip.compress(b"a line of an audit log\n" * 99)
    broken.write_bytes(b"no archive")
    damaged.write_bytes(whole[:10] + b"\xff" * 20 + whole[30:])
    for path in (tmp_path / "missing", broken, damaged):
        with pytest.raises(InputError, match=f"FILE: cannot read {path}"):
            run_verify([path], None)
