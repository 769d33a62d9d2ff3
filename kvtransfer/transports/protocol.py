"""The protocols of a transport's two ends. The link owns the connection; a transport moves the bytes of pieces.

Blocking work (digests, copies, collective operations) runs in threads (`threads.py`), never on the agent's loop.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvtransfer.connection.handshake import XXH3, Welcome
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.session.piece import Piece

PROBE_BYTES = 4096
STALL_S = 2.0  # a link whose pieces do not move for this long is closed; a slow prefill counts against its ticket


class WelcomeTerms(NamedTuple):
    """What the receiver's transport adds to the welcome: its data port and token, the kind of digests, and its largest
    piece if that is not the transport's."""

    data_port: int | None = None
    data_token: bytes = b""
    digest_kind: str = XXH3
    digest_key: int = 0
    max_piece_bytes: int | None = None


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
        """Announces a piece once it has its staging, and sends it if the transport carries bytes. Our blocks are read
        until it is acknowledged.

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
        """Writes the piece to our blocks; returns the digest of the bytes as they were read or received. Our blocks are
        not read again.

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
