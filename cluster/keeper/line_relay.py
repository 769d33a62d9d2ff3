"""What a process prints, line by line, with the process's name: a JSON object gets a field, any other line a prefix."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from typing import cast

from cluster.keeper.lossy_output import LossyOutput

MAX_LINE_CHARS = 64 << 10  # a longer one is cut into lines
PIPE_BYTES = 1 << 20  # while this process is busy
FIELD = "log"


class LineRelay(asyncio.Protocol):
    """Reads one process's output from a pipe, always, whatever becomes of the lines: the process never waits."""

    def __init__(self, name: str, output: LossyOutput) -> None:
        self.last_line = ""
        self._name = name
        self._output = output
        self._begun = b""  # of a line without its end
        self._is_cut = False  # the line's beginning was told
        self._has_ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> int:
        """Returns the descriptor to which the process writes; the caller closes it. Raises OSError."""
        reading, writing = os.pipe()
        with contextlib.suppress(OSError):  # the user may have too many large ones
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            pipe = os.fdopen(reading, "rb", buffering=0)
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        except BaseException:
            os.close(writing)
            raise
        return writing

    def data_received(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if lines:
            if lines[0] or not self._is_cut:  # what was told has no more than its end left
                self._tell(lines[0])
            self._is_cut = False
        for line in lines[1:]:
            self._tell(line)
        if len(self._begun) > MAX_LINE_CHARS:
            self._tell(self._begun)
            self._begun, self._is_cut = b"", True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._begun:
            self._tell(self._begun)
            self._begun = b""
        self._has_ended.set()

    async def ended(self, timeout_s: float) -> None:
        """Returns when all was read, or what the process started still has its output open after that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _tell(self, line: bytes) -> None:
        text = line.rstrip(b"\r").decode(errors="replace")
        if text.strip():
            self.last_line = text.strip()
        for start in range(0, max(1, len(text)), MAX_LINE_CHARS):
            self._output.write(named(self._name, text[start : start + MAX_LINE_CHARS]) + "\n")


def named(name: str, line: str) -> str:
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict) and fields:
            known = cast(dict[str, object], fields)
            return line if FIELD in known else f'{{"{FIELD}": {json.dumps(name)}, {line[1:]}'
    return f"{name}: {line}"
