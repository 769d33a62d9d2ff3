"""The protocols of a transport's two ends. The link owns the connection; a transport moves the bytes of pieces.

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
HANG_GRACE_S = 0.25  # time for an operation to notice that its link closed


class LinkThread:
    """The thread of one link. Its operations run in order.

    Args:
        on_hung: called with the thread's name if an operation on pieces still runs `HANG_GRACE_S` after `close`, or if
            the device is lost.
    """

    def __init__(self, name: str, on_hung: Callable[[str], None] | None = None) -> None:
        self.moves_pieces = False  # earlier operations have their own long timeouts and use no pool
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
        """`run` for work in memory only. Small work runs at once, because a thread switch would cost more."""
        if size_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)

    def close(self) -> None:
        """Never waits. A running operation ends because its link is closed too; if it hangs, `on_hung` is called."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self.moves_pieces and not self._is_closed:
            asyncio.get_running_loop().call_later(HANG_GRACE_S, self._check)
        self._is_closed = True

    def _check(self) -> None:
        if self._is_running and self._on_hung is not None:
            self._on_hung(self._name)


class WelcomeTerms(NamedTuple):
    """What the receiver's transport adds to the welcome: its data port and token, and the kind of digests."""

    data_port: int | None = None
    data_token: bytes = b""
    digest_kind: str = XXH3
    digest_key: int = 0


class KvSender(Protocol):
    """The sending end of one link."""

    def hello_fds(self) -> list[int]:
        """Descriptors to send with the hello. The caller closes them."""
        ...

    async def establish(self, welcome: Welcome) -> None:
        """Creates the data path. Raises HandoffFault (transport)."""
        ...

    async def send_probe(self, stream: FrameStream) -> int:
        """Sends a small payload in the same way as pieces. Returns its digest, which the receiver must also compute."""
        ...

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """Announces a piece, and sends it if the transport carries bytes. Our blocks are read until it is acknowledged.

        The digest is in the announcement, or follows, xor a number announced in its place. Raises HandoffFault
        (transport) if the data path failed, after which the link must end.
        """
        ...

    async def settle(self) -> None:
        """Waits until the digests of all pushed pieces are sent, for frames that must follow them."""
        ...

    def close(self) -> None: ...


class PieceArrival(Protocol):
    """A piece that is ready to be written. Nothing has been written to the local pool."""

    @property
    def digest_follows(self) -> bool:
        """Whether the digest follows in a DIGEST frame, xor the announced number."""
        ...

    async def place(self, span: PoolSpan) -> int:
        """Writes the piece to our blocks; returns the digest of the bytes written.

        Raises HandoffFault (transport) if the data path failed, after which the link must end.
        """
        ...

    async def discard(self) -> None:
        """Skips a refused piece, so that the next one can be received. Raises like `place`."""
        ...


class KvReceiver(Protocol):
    """The receiving end of one link."""

    @property
    def places_ahead(self) -> bool:
        """Whether the next piece may be fetched and placed while another is being placed."""
        ...

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        """Before the welcome: uses the descriptors of the hello, without closing them. Raises HandoffFault."""
        ...

    async def establish(self) -> None:
        """Creates the data path. Raises HandoffFault (transport)."""
        ...

    async def receive_probe(self) -> int:
        """The digest of the probe's payload as received."""
        ...

    async def fetch(self, piece: Piece, body: bytes) -> PieceArrival:
        """Prepares an announced piece, whose size was checked, for `place`.

        Raises:
            HandoffFault: the announcement is invalid, or the data path failed, after which the link must end.
        """
        ...

    def close(self) -> None: ...
