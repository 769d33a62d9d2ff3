"""The audit log: one JSON line per call, written by its own thread, so that a slow disk delays no request.

It never contains prompts, answers or keys. The file may be moved or truncated at any time: if it was moved, the next
line goes to a new file. Several processes may write one file: each holds a lock while it appends whole lines.

Lossless: no line is lost, except by the death of the process or the machine while it waits in memory. `has_room` is
false while lines cannot be written; who asks refuses its call then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tandem.config.auth import STDOUT, AuthSpec
from tandem.errors import ConfigError, UnavailableError
from tandem.telemetry.audit_chain import Chain, Mark, last_value

log = logging.getLogger(__name__)

FIELD = "security.auth.audit_log"
KEY_FIELD = "security.auth.audit_key_file"
MAX_WAITING = 100_000
LEAST_KEY_BYTES = 32
REPEAT_S = 60.0  # between two messages about one cause
CLOSE_S = 3.0
RETRY_S = 0.5
_AT_ONCE = 1000
_GATHER_S = 0.05  # lines of this time are written together, after one wake-up
_TAIL_BYTES = 256

OnWritten = Callable[[], None]
_Entry = tuple[bytes, OnWritten | None]


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
    details: str = ""  # what an admin call asked for


class AuditLog:
    """Args:
    target: a path, or "stdout".
    chain: links the lines (tandem/telemetry/audit_chain.py).
    must_open: whether a file that cannot be opened is an error; otherwise the thread tries again.
    """

    def __init__(
        self, target: str, *, is_lossless: bool = False, chain: Chain | None = None, must_open: bool = True
    ) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = None if target == STDOUT else target
        self.is_lossless = is_lossless
        self._chain = chain
        self._has_header = False  # in the file that is open
        self._lines: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._in_hand = 0  # lines that the thread is writing
        self._dropped = 0
        self._lost = 0
        self._missing = (0, 0)  # lost and dropped ones that the next write tells
        self._refused = 0
        self._is_failing = False
        self._told_s = -REPEAT_S
        self._file = -1
        try:
            self._follow_rotation()
        except OSError:
            if must_open:
                raise
            self._is_failing = True
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, auth: AuthSpec, writer: str, *, must_open: bool = True) -> AuditLog | None:
        """None if there shall be none. `writer`: the name of this process. Raises ConfigError."""
        if (target := auth.audit_log) is None:
            return None
        key = None if auth.audit_key_file is None else read_key(Path(auth.audit_key_file), KEY_FIELD)
        chain = Chain(writer, key) if auth.audit_chained else None
        try:
            return cls(target, is_lossless=auth.audit_lossless, chain=chain, must_open=must_open)
        except OSError as error:
            raise ConfigError(f"{FIELD}: {target}: {error.strerror}", field=FIELD) from None

    def require_room(self) -> None:
        """Raises UnavailableError if a call that begins now might go unlogged."""
        if self.is_lossless and (self._is_failing or self._lines.qsize() >= MAX_WAITING // 2):
            self._refused += 1
            raise UnavailableError(
                f"{FIELD}: calls are refused while the audit log cannot be written (audit_lossless): try again later",
                retry_after_s=RETRY_S,
            )

    def write(self, line: AuditLine, on_written: OnWritten | None = None) -> None:
        """Never waits. Unless lossless, lines beyond MAX_WAITING are dropped, and their number is logged. `on_written`
        is called by the thread that wrote it."""
        if self.is_lossless or self._lines.qsize() < MAX_WAITING:
            self._lines.put((msgspec.json.encode(line), on_written))
        else:
            self._dropped += 1

    def close(self) -> None:
        """Writes the waiting lines, but waits at most CLOSE_S for the disk."""
        self._lines.put(None)
        self._thread.join(CLOSE_S)  # it is a daemon
        if self._thread.is_alive() and self.is_lossless:
            left = self._in_hand + self._lines.qsize() - 1
            log.error("%s: %d lines could not be written before the end", FIELD, left)

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = self._gathered()
            ended = None in batch
            self._write([entry for entry in batch if entry is not None])
        if self._chain is not None:
            self._missing = (self._lost, self._dropped)
            self._try_to_store([], ends=True)
        if self._lost:
            log.error("%s: %d lines were lost until the end", FIELD, self._lost)
        if self._path is not None and self._file >= 0:
            os.close(self._file)

    def _gathered(self) -> list[_Entry | None]:
        """Empty only while a lossless log fails: no call is admitted that would try it again."""
        try:
            batch = [self._lines.get(timeout=RETRY_S if self._is_failing and self.is_lossless else None)]
        except queue.Empty:
            return []
        time.sleep(_GATHER_S)
        while len(batch) < _AT_ONCE and not self._lines.empty():
            batch.append(self._lines.get_nowait())
        return batch

    def _write(self, entries: Sequence[_Entry]) -> None:
        if not entries and not self.is_lossless:
            return  # to write nothing would prove nothing
        self._missing = (self._lost, self._dropped)
        lines, self._in_hand = [line for line, _ in entries], len(entries)
        while not (is_written := self._try_to_store(lines)) and self.is_lossless:
            time.sleep(RETRY_S)  # `close` does not wait for ever, and the thread is a daemon
        self._in_hand = 0
        if not is_written:
            self._lost += len(lines)
            return
        for _, on_written in entries:
            if on_written is not None:
                on_written()
        self._tell_healed()

    def _try_to_store(self, lines: Sequence[bytes], *, ends: bool = False) -> bool:
        try:
            self._store(lines, ends)
        except OSError as error:
            self._is_failing = True
            self._tell(error)
            return False
        return True

    def _tell(self, error: OSError) -> None:
        if (now_s := time.monotonic()) - self._told_s < REPEAT_S:
            return
        self._told_s = now_s
        what = "calls are refused" if self.is_lossless else "lines are lost"
        where = self._path or STDOUT
        log.error("%s: %s: cannot write to %s (%s): free space there, or mend it", FIELD, what, where, error.strerror)

    def _tell_healed(self) -> None:
        lost, dropped = self._missing
        if self._is_failing:
            self._is_failing, self._told_s = False, -REPEAT_S
            refused, self._refused = self._refused, 0
            told = f"{refused} calls were refused" if self.is_lossless else f"{lost} lines were lost"
            log.warning("%s: written again; %s", FIELD, told)
        if dropped:
            log.error("%s: %d lines were dropped because the disk is too slow", FIELD, dropped)
        self._lost -= lost
        self._dropped -= dropped

    def _store(self, lines: Sequence[bytes], ends: bool) -> None:
        """Appends all of the lines, or none. Raises OSError."""
        self._follow_rotation()
        if self._path is None:
            _write_all(self._file, b"".join(line + b"\n" for line in lines))
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._append(lines, ends)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, lines: Sequence[bytes], ends: bool) -> None:
        found = os.fstat(self._file)
        is_regular, size = stat.S_ISREG(found.st_mode), found.st_size
        tail = os.pread(self._file, _TAIL_BYTES, max(0, size - _TAIL_BYTES)) if is_regular else b""
        chain = None if self._chain is None else replace(self._chain)
        if chain is not None:
            lines = self._linked(chain, lines, tail, ends)
        data = b"".join(line + b"\n" for line in lines)
        if tail and not tail.endswith(b"\n"):  # another process was killed while it wrote
            data = b"\n" + data
        try:
            _write_all(self._file, data)
            if self.is_lossless and is_regular:
                os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise
        self._chain, self._has_header = chain, True

    def _linked(self, chain: Chain, lines: Sequence[bytes], tail: bytes, ends: bool) -> list[bytes]:
        marks = [] if self._has_header and tail else [chain.header(utc_now(), last_value(tail))]
        if missing := sum(self._missing):
            marks.append(chain.mark(utc_now(), Mark.LOST, lines=missing))
        linked = marks + [chain.link(line) for line in lines]
        return [*linked, chain.mark(utc_now(), Mark.END)] if ends else linked

    def _follow_rotation(self) -> None:
        if self._path is None:
            self._file = sys.stdout.fileno()
            return
        if self._file >= 0:
            opened = os.fstat(self._file)
            with suppress(FileNotFoundError):
                named = os.stat(self._path)
                if (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino):
                    return
        # Readable too: what ends the file decides how it goes on.
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._has_header = file, False


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def check_audit_log(auth: AuthSpec) -> None:
    """Raises ConfigError if its file or its key cannot be used."""
    if auth.audit_key_file is not None:
        read_key(Path(auth.audit_key_file), KEY_FIELD)
    if auth.audit_log in (None, STDOUT):
        return
    path = Path(auth.audit_log)
    found = path if path.exists() else path.parent
    if not os.access(found, os.W_OK):
        raise ConfigError(
            f"{FIELD}: cannot write to {found}: create the folder, or give this user access to it", field=FIELD
        )


def read_key(path: Path, field: str) -> bytes:
    """The key of a chain, without white space around it. Raises ConfigError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}", field=field) from None
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{field}: expected at least {LEAST_KEY_BYTES} bytes in {path}, got {len(key)}: `openssl rand -hex 32` "
            "makes a key",
            field=field,
        )
    return key


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
