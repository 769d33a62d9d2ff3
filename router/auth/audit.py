"""The audit log: one JSON line per call, written by its own thread, so that a slow disk delays no request.

It never contains prompts, answers or keys. The file may be moved or truncated at any time: if it was moved, the next
line goes to a new file.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from datetime import UTC, datetime

import msgspec

log = logging.getLogger(__name__)

STDOUT = "stdout"
MAX_WAITING = 100_000
_AT_ONCE = 1000
_GATHER_S = 0.05  # lines of this time are written together, after one wake-up


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=False):
    time: str
    request_id: str
    trace_id: str
    key_id: str
    tenant: str
    source: str
    method: str
    model: str
    outcome: str  # the end state of the request; `rejected` if it had none; `ok` for calls that generate nothing
    code: str | None
    prompt_tokens: int
    completion_tokens: int
    duration_s: float


class AuditLog:
    """Args: `target` is a path, or "stdout"."""

    def __init__(self, target: str) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = None if target == STDOUT else target
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._dropped = 0
        self._lost = 0
        self._file = sys.stdout.fileno() if self._path is None else _open(self._path)
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, line: AuditLine) -> None:
        """Never waits. Beyond MAX_WAITING, lines are dropped, and their number is logged."""
        if self._lines.qsize() < MAX_WAITING:
            self._lines.put(msgspec.json.encode(line) + b"\n")
        else:
            self._dropped += 1

    def close(self) -> None:
        """Writes the waiting lines, but waits at most 3 s for the disk."""
        self._lines.put(None)
        self._thread.join(3.0)  # it is a daemon

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._lines.get()]
            time.sleep(_GATHER_S)
            while len(batch) < _AT_ONCE and not self._lines.empty():
                batch.append(self._lines.get_nowait())
            ended = None in batch
            self._write(b"".join(line for line in batch if line is not None))
        if self._path is not None:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        """Counts the lines that it cannot write, and logs their number once writing works again. A line that was
        written in part stays."""
        try:
            self._follow_rotation()
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if not self._lost:
                log.error("security.auth.audit_log: lines are lost: %s", error.strerror)
            self._lost += data.count(b"\n")
            return
        if self._lost:
            log.warning("security.auth.audit_log: written again; %d lines were lost", self._lost)
            self._lost = 0
        if self._dropped:
            log.error("security.auth.audit_log: %d lines were dropped because the disk is too slow", self._dropped)
            self._dropped = 0

    def _follow_rotation(self) -> None:
        if self._path is None:
            return
        opened = os.fstat(self._file)
        try:
            named = os.stat(self._path)
            moved = (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            file = _open(self._path)
            os.close(self._file)
            self._file = file


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
