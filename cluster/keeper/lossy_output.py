"""Output of a process that must not end, or wait, because of who reads it: a closed pipe, a full disk, `| less`."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import stat
import sys
import threading
from collections.abc import Iterator

KEPT_BYTES = 4 << 20  # that wait for a slow reader
CLOSE_S = 1.0  # for what still waits at the end
CONTAINER_STDOUT = "/proc/1/fd/1"  # of the process that is the container


class LossyOutput(io.TextIOBase):
    """`write` never waits and never fails: a thread writes to the descriptor. What it cannot write is dropped, and the
    number of dropped lines is written where they are missing."""

    def __init__(self, descriptor: int, encoding: str, kept_bytes: int = KEPT_BYTES) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._most_bytes = kept_bytes
        self._kept_bytes = self._dropped = 0
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A daemon: at the end of the process it may still wait for its reader.
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="output")
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return self._encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        data = text.encode(self._encoding, "replace")
        with self._lock:
            # Once lines are dropped, half must have been read before others are kept, so the note is rare.
            if self._kept_bytes + len(data) > self._most_bytes // (2 if self._dropped else 1):
                self._dropped += data.count(b"\n")
            else:
                self._keep(self._note() + data)
        return len(text)

    def finish(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for what was written, but not for a reader that does not read."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _keep(self, data: bytes) -> None:
        self._kept_bytes += len(data)
        self._waiting.put(data)

    def _note(self) -> bytes:
        """Empty if no lines were dropped. With the lock."""
        dropped, self._dropped = self._dropped, 0
        return f"{dropped} lines were dropped here: nothing read them in time\n".encode() if dropped else b""

    def _write_all(self) -> None:
        while (data := self._waiting.get()) is not None:
            is_written = self._is_written(data)
            with self._lock:
                self._kept_bytes -= len(data)
                note = self._note() if is_written and not self._kept_bytes else b""
            self._is_written(note)

    def _is_written(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            with self._lock:
                self._dropped += data.count(b"\n")
            return False
        return True


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Makes stdout and stderr lossy."""
    outputs = [LossyOutput(each.fileno(), each.encoding) for each in (sys.stdout, sys.stderr)]
    sys.stdout.flush()
    try:
        with contextlib.redirect_stdout(outputs[0]), contextlib.redirect_stderr(outputs[1]):
            yield
    finally:
        for output in outputs:
            output.finish()


def own_output() -> LossyOutput:
    """For lines beside those of this process."""
    return sys.stdout if isinstance(sys.stdout, LossyOutput) else LossyOutput(sys.stdout.fileno(), "utf-8")


def container_output() -> LossyOutput | None:
    """The standard output of the container that this process runs in, of the same user; None if it has none."""
    try:
        descriptor = os.open(CONTAINER_STDOUT, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.close(descriptor)
            return None
    except OSError:
        return None
    os.set_blocking(descriptor, True)
    return LossyOutput(descriptor, "utf-8")
