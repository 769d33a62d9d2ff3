"""Output of a process that must not end, or wait, because of who reads it: a closed pipe, a full disk, `| less`."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Iterator

KEPT_WRITES = 1000  # that wait for a slow reader
CLOSE_S = 1.0  # for what still waits at the end


class LossyOutput(io.TextIOBase):
    """`write` never waits and never fails: a thread writes to the descriptor. What it cannot write is dropped."""

    def __init__(self, descriptor: int, encoding: str, kept_writes: int = KEPT_WRITES) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._waiting: queue.Queue[str | None] = queue.Queue(kept_writes)
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
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(text)
        return len(text)

    def finish(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for what was written, but not for a reader that does not read."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            data = text.encode(self._encoding, "replace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._descriptor, data) :]


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
