"""The two halves of a transport. The link owns the connection; a transport adds what moves the bytes of pieces.

Blocking work (digests, copies, collective operations) runs in the link's own thread, never on the agent's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from kvtransfer.causes import DeviceLost
from kvtransfer.connection.handshake import XXH3, Welcome
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.session.piece import Piece

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
PROBE_BYTES = 4096
STALL_S = 2.0  # a link whose pieces do not move for this long is closed; a slow prefill counts against its ticket
INLINE_BYTES = 256 << 10  # about 50 µs of copying and hashing
HANG_GRACE_S = 0.25  # for an operation to notice that its link was closed


class LinkThread:
    """One thread of one link: its operations run in order.

    Args:
        on_hung: told the name when an operation on pieces has not come back `HANG_GRACE_S` after `close`, or when the
            device is lost.
    """

    def __init__(self, name: str, on_hung: Callable[[str], None] | None = None) -> None:
        self.moves_pieces = False  # before that, operations have long timeouts of their own and touch no pool
        self._name = name
        self._on_hung = on_hung
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._is_closed = False
        self._is_running = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            self._is_running = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_running = False

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, run)
        except DeviceLost as error:
            log.error("%s: the device is lost: %s", self._name, error)
            if self._on_hung is not None:
                self._on_hung(self._name)  # the next agent can use the device again
            raise

    async def run_on(self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for work that only touches memory: so little of it that a hop would cost more is done at once."""
        if size_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)

    def close(self) -> None:
        """Never waits: what runs ends by itself, because its link is closed too; or it hangs, and `on_hung` hears."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self.moves_pieces and not self._is_closed:
            asyncio.get_running_loop().call_later(HANG_GRACE_S, self._check)
        self._is_closed = True

    def _check(self) -> None:
        if self._is_running and self._on_hung is not None:
            self._on_hung(self._name)


class WelcomeTerms(NamedTuple):
    """What the receiver's transport adds to the welcome: where it takes its data path, what a connection there must
    show, and how digests are made."""

    data_port: int | None = None
    data_token: bytes = b""
    digest_kind: str = XXH3
    digest_key: int = 0


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

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """Announces a piece and sends it where the transport does; our blocks are read until it is acknowledged. Its
        digest goes with the announcement; or it follows, xor a number that is announced in its place. Raises
        HandoffFault (transport) when the data path broke: then the link must end."""
        ...

    async def settle(self) -> None:
        """Returns when all digests of what was pushed are sent; frames that must come behind wait for it."""
        ...

    def close(self) -> None: ...


class PieceArrival(Protocol):
    """A piece that is ready to be written. Nothing was written to our pool yet."""

    @property
    def digest_follows(self) -> bool:
        """In a DIGEST frame, xor the number that was announced."""
        ...

    async def place(self, span: PoolSpan) -> int:
        """Writes the piece into our blocks; returns the digest of the bytes that were written. Raises HandoffFault
        (transport) when the data path broke: then the link must end."""
        ...

    async def discard(self) -> None:
        """Instead of `place`: the piece was refused, and the next one must still be found. Raises like `place`."""
        ...


class KvReceiver(Protocol):
    """The receiving half of one link."""

    @property
    def places_ahead(self) -> bool:
        """Pieces do not hang together: the next may be fetched and placed while one is being placed."""
        ...

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        """Before the welcome: takes what came with the hello (and closes none of it). Raises HandoffFault."""
        ...

    async def establish(self) -> None:
        """Makes the data path. Raises HandoffFault (transport)."""
        ...

    async def receive_probe(self) -> int:
        """The digest of the probe's payload, as it arrived."""
        ...

    async def fetch(self, piece: Piece, body: bytes) -> PieceArrival:
        """Brings the announced piece within reach. Its size was checked.

        Raises:
            HandoffFault: the announcement is wrong, or the data path broke: then the link must end.
        """
        ...

    def close(self) -> None: ...
