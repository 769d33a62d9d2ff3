"""The two halves of a transport. The link owns the connection; a transport adds what moves the bytes of pieces.

Blocking work (digests, copies, collective operations) runs in the link's own thread, never on the agent's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from kvtransfer.handshake import Welcome
from kvtransfer.piece import Piece
from kvtransfer.pool import Span
from kvtransfer.stream import FrameStream

P = ParamSpec("P")
T = TypeVar("T")
PROBE_BYTES = 4096
INLINE_BYTES = 256 << 10  # about 50 µs of copying and hashing


class LinkThread:
    """One thread of one link: its operations run in order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def run_on(self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for work that only touches memory: so little of it that a hop would cost more is done at once."""
        if size_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)

    def close(self) -> None:
        """Never waits: what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class KvSender(Protocol):
    """The sending half of one link."""

    def hello_fds(self) -> list[int]:
        """Descriptors that travel with the hello; the caller closes them."""
        ...

    async def establish(self, welcome: Welcome) -> None:
        """Makes the data path. Raises HandoffFault (transport)."""
        ...

    async def send_probe(self, stream: FrameStream) -> int:
        """Sends a small payload the way pieces go; returns its digest, which the receiver must find too."""
        ...

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        """Announces a piece with its digest, and sends it where the transport does; our blocks are read until it is
        acknowledged. Raises HandoffFault (transport) when the data path broke: then the link must end."""
        ...

    def close(self) -> None: ...


class Arrival(Protocol):
    """A piece that is ready to be written. Nothing was written to our pool yet."""

    async def place(self, span: Span) -> int:
        """Writes the piece into our blocks; returns the digest of the bytes that were written."""
        ...


class KvReceiver(Protocol):
    """The receiving half of one link."""

    async def prepare(self, fds: list[int]) -> int | None:
        """Before the welcome: takes what came with the hello (and closes none of it); returns the store's port, if
        the transport has one. Raises HandoffFault."""
        ...

    async def establish(self) -> None:
        """Makes the data path. Raises HandoffFault (transport)."""
        ...

    async def receive_probe(self) -> int:
        """The digest of the probe's payload, as it arrived."""
        ...

    async def fetch(self, piece: Piece, body: bytes) -> Arrival:
        """Brings the announced piece within reach. Its size was checked.

        Raises:
            HandoffFault: the announcement is wrong, or the data path broke: then the link must end.
        """
        ...

    def close(self) -> None: ...
