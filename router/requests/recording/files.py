"""Recordings on disk: the last segments of a router's decisions, in a folder, written by a thread of their own."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

from router.requests.recording.recorder import KIND, VERSION, Recorder, RecordingHeader, encoder
from tandem.config.router import RouterSpec
from tandem.errors import ConfigError
from tandem.version import tandem_version

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 20
SEGMENTS = 8
MAX_WAITING_BYTES = 16 << 20  # that the thread has not written; further lines are dropped and counted


class RecordingFiles:
    """`ROUTER_ID-NUMBER.jsonl`, each readable by itself. Older ones of the same router are deleted."""

    def __init__(self, folder: Path, router_id: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises ConfigError when the folder cannot be written."""
        self.dropped = 0
        self._folder, self._router_id, self._segment_bytes = folder, router_id, segment_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._kept = deque(sorted(filter(self._is_segment, folder.iterdir()), key=_number))
            self._last = _number(self._kept[-1]) if self._kept else 0
            self._first: BinaryIO | None = self._open_next()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(f"router.record: {folder}: {why}", field="router.record") from None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()  # of `_waiting_bytes`
        self._is_stopped = False
        self._header = b""
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    def recorder(self, spec: RouterSpec, *, seed: int, text: bool) -> Recorder:
        """Starts the thread."""
        fields = spec.model_dump(mode="json")
        self._header = encoder.encode(
            RecordingHeader(KIND, VERSION, tandem_version(), self._router_id, text, seed, fields)
        )
        self._thread.start()
        return Recorder(self.write, text=text)

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what there is, for at most `timeout_s`."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(timeout_s)

    def write(self, line: bytes) -> None:
        if self._is_stopped or (self._lines.qsize() and self._waiting_bytes + len(line) > MAX_WAITING_BYTES):
            if not self.dropped:
                log.warning("recording is behind or stopped: decisions are missing from it")
            self.dropped += 1
            return
        with self._lock:
            self._waiting_bytes += len(line)
        self._lines.put_nowait(line)

    def _run(self) -> None:
        try:
            while self._write_segment():
                pass
        except OSError as error:
            self._is_stopped = True
            log.error("recording stopped", extra={"folder": str(self._folder), "error": error.strerror or str(error)})

    def _write_segment(self) -> bool:
        """False: that was the last."""
        opened, self._first = self._first or self._open_next(), None
        while len(self._kept) > SEGMENTS:
            self._kept.popleft().unlink(missing_ok=True)
        written = 0
        with opened as file:
            file.write(self._header + b"\n")
            while written < self._segment_bytes:
                line = self._lines.get()
                if line is None:
                    return False
                with self._lock:
                    self._waiting_bytes -= len(line)
                file.write(line + b"\n")
                written += len(line) + 1
                if self._lines.empty():
                    file.flush()
        return True

    def _open_next(self) -> BinaryIO:
        """A new file: another process may record under the same id."""
        while True:
            self._last += 1
            path = self._folder / f"{self._router_id}-{self._last:06}.jsonl"
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # may hold prompts
            except FileExistsError:
                continue
            self._kept.append(path)
            return os.fdopen(handle, "wb")

    def _is_segment(self, path: Path) -> bool:
        return re.fullmatch(rf"{re.escape(self._router_id)}-\d{{6,}}\.jsonl", path.name) is not None


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
