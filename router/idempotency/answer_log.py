"""The log of one answer: its head, its chunks and its end. One run writes it, any number of clients read it.

A log that grows too large is not kept: then it holds only what its readers have not read yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import RequestCancelled, TandemError

MAX_KEPT_BYTES = 4 << 20  # of one answer
CHUNK_BYTES = 64  # what Python keeps for a chunk beyond its content
PAUSE_BYTES = 256 << 10  # unread of an answer that is not kept: the run waits for its readers


@dataclass(frozen=True, slots=True)
class Head:
    """Of an HTTP answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Memory(Protocol):
    """What all logs may keep together."""

    def take(self, tenant: str, size_bytes: int) -> bool:
        """False, and nothing is taken, if it is too much."""
        ...

    def give_back(self, tenant: str, size_bytes: int) -> None: ...


class AnswerLog:
    def __init__(self, memory: Memory, tenant: str) -> None:
        self.head: Head | None = None
        self.error: TandemError | None = None  # follows the chunks
        self.ended = False
        self.is_kept = True
        self.is_replayed = False  # another router's run wrote it
        self.kept_bytes = 0
        self._memory = memory
        self._tenant = tenant
        self._chunks: list[bytes] = []
        self._forgotten = 0  # chunks before `_chunks[0]`
        self._readers: set[LogReader] = set()
        self._read = asyncio.Event()

    @property
    def chunks(self) -> list[bytes]:
        """All of them if the log is kept, else those that a reader lacks."""
        return self._chunks

    @property
    def readers(self) -> int:
        return len(self._readers)

    def append(self, chunk: bytes) -> None:
        size_bytes = len(chunk) + CHUNK_BYTES
        self._chunks.append(chunk)
        if self.is_kept:
            if self.kept_bytes + size_bytes <= MAX_KEPT_BYTES and self._memory.take(self._tenant, size_bytes):
                self.kept_bytes += size_bytes
            else:
                self.forget()
        self._wake()

    def end(self, error: TandemError | None = None) -> None:
        self.error, self.ended = error, True
        self._wake()

    def forget(self) -> None:
        """Keeps the log no longer; its readers still get all of it."""
        self._memory.give_back(self._tenant, self.kept_bytes)
        self.is_kept, self.kept_bytes = False, 0
        self._trim()

    @property
    def is_full(self) -> bool:
        """A run should write no more until `room`, as a reader is slow and the log is not kept."""
        return not self.is_kept and sum(map(len, self._chunks)) > PAUSE_BYTES

    async def room(self) -> None:
        while self.is_full:
            self._read.clear()
            await self._read.wait()

    def reader(self, on_close: Callable[[], None]) -> LogReader:
        """Reads from the start. For a log that is kept."""
        reader = LogReader(self, on_close)
        self._readers.add(reader)
        return reader

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _take(self, position: int) -> list[bytes]:
        return self._chunks[position - self._forgotten :]

    def _trim(self) -> None:
        if not self.is_kept:
            end = self._forgotten + len(self._chunks)
            unread = min((reader.position for reader in self._readers), default=end)
            del self._chunks[: unread - self._forgotten]
            self._forgotten = unread
        self._read.set()

    def _left(self, reader: LogReader) -> None:
        self._readers.discard(reader)
        self._trim()


class LogReader:
    """One client's place in a log. For one task."""

    def __init__(self, log: AnswerLog, on_close: Callable[[], None]) -> None:
        self.log = log
        self.position = 0  # chunks read
        self.is_repeat = False
        self._on_close = on_close
        self._is_lost = False
        self._waiting: asyncio.Future[None] | None = None

    async def next(self) -> list[bytes]:
        """Waits for chunks and returns all there are; none: the end. Raises the TandemError at the end of the log, and
        RequestCancelled after `lost`."""
        while True:
            if self._is_lost:
                raise RequestCancelled("the client closed the connection")
            if chunks := self.log._take(self.position):
                self.position += len(chunks)
                self.log._trim()
                return chunks
            if self.log.error is not None:
                error = self.log.error  # of its own for each reader: a traceback would keep all of them in memory
                raise copy(error)
            if self.log.ended:
                return []
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def lost(self) -> None:
        """The client is gone: `next` raises."""
        self._is_lost = True
        self.wake()

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        self.log._left(self)
        self._on_close()
