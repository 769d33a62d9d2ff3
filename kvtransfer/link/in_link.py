"""The receiving end of a link: check the hello, answer, then take frames in order, one piece at a time.

To end a link, close its stream. It then ends between two writes, never inside one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import MAPPED, Hello, LocalRank, Refused, Welcome, check_hello, parse_hello
from kvtransfer.connection.sockets import peer_is_same_user, receive_first, send_first
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import TlsConnection, Wire
from kvtransfer.control import LinkReport, LinkState
from kvtransfer.link.liveness import LinkWatch
from kvtransfer.session.piece import FrameType, Header, Piece, as_in_pool, check_size, failure_body
from kvtransfer.session.receive import ReceiveSession
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.factory import Transports, max_piece_bytes
from kvtransfer.transports.protocol import KvReceiver
from kvtransfer.transports.threads import INLINE_BYTES, LinkThread
from tandem.errors import IncompatiblePools, IncompatibleVersions
from tandem.rpc.channel import encode

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
PLACES_AHEAD = 8  # pieces queued for the link's thread, to keep it busy
PROBE_TIMEOUT_S = 60.0  # the sender may load torch first


class InLinkEvents(Protocol):
    def link_up(self, link: InLink) -> None: ...
    def link_open(self, link: InLink, ticket_id: str, signed: bytes) -> None: ...
    def link_session(self, link: InLink, ticket_id: str) -> ReceiveSession | None:
        """The session that accepted this link, if it still takes pieces."""
        ...

    def has_ticket(self, ticket_id: str) -> bool:
        """Whether this ticket is or was open here. Pieces of a finished ticket may still arrive."""
        ...

    def link_written(self, link: InLink, ticket_id: str, piece: Piece, digest: int, verify_s: float) -> None: ...
    def link_fault(self, link: InLink, ticket_id: str, fault: HandoffFault, *, writing: bool) -> None:
        """This ticket failed. `writing`: a started write ended without its piece."""
        ...

    def link_finish(self, link: InLink, ticket_id: str, pieces: int) -> None: ...
    def link_abort(self, link: InLink, ticket_id: str) -> None: ...
    def link_down(self, link: InLink, cause: HandoffCause, reason: str) -> None: ...


@dataclass(slots=True)
class InLink:
    """A link after its handshake and probe."""

    local: LocalRank
    hello: Hello
    link: PlannedLink
    stream: FrameStream
    receiver: KvReceiver
    thread: LinkThread
    max_piece_bytes: int
    moved_bytes: int = 0
    is_taking: bool = False
    is_resting: bool = False  # the sender closes it until it needs it again
    used_s: float = 0.0  # when a ticket last used it, on the owner's clock
    watch: LinkWatch = field(init=False)
    _placing: deque[asyncio.Task[None]] = field(default_factory=deque)
    _pending_digests: deque[tuple[str, int, asyncio.Future[int]]] = field(default_factory=deque)
    _placed_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.watch = LinkWatch(
            lambda: self.is_taking or bool(self._placing),
            is_held_up=lambda: self.thread.is_held_up,
            hears=lambda: not self.is_taking,
        )

    def reply(self, kind: FrameType, ticket_id: str, seq: int = 0, body: bytes = b"") -> None:
        self.stream.send(Header(kind, ticket_id, seq=seq), body)

    def fail(self, ticket_id: str, cause: HandoffCause, message: str) -> None:
        self.reply(FrameType.FAIL, ticket_id, body=failure_body(cause, message))

    def rest(self) -> None:
        """Asks the sender to close the link until it needs it again; it does so if no ticket needs it there. One of an
        earlier release does nothing."""
        self.stream.send(Header(FrameType.IDLE))

    def close(self) -> None:
        """Ends `run` after the current write. If that write hangs, the agent exits."""
        self._fail_pending_digests()
        self.stream.close()
        self.receiver.close()
        self.thread.close()

    def report(self, state: LinkState, reason: str) -> LinkReport:
        hello = self.hello
        return LinkReport(hello.worker_id, hello.epoch, hello.rank, hello.transport, state, reason, self.moved_bytes)

    async def run(self, events: InLinkEvents) -> None:
        """Runs until the connection ends or stalls."""
        cause, reason = HandoffCause.PEER_LOST, "the sender's connection ended"
        watching = asyncio.create_task(self._watch())
        try:
            async for header, body in self.stream.frames():
                await self._take(events, header, body)
                await self.stream.drain()  # a peer that does not read must not fill our memory
                self.watch.heard()
            self._fail_pending_digests()
            await self._settle()
        except HandoffFault as fault:
            cause, reason = fault.cause, fault.message
            log.warning("link from %s rank %d failed: %s", self.hello.worker_id, self.hello.rank, reason)
        except ConnectionError:
            pass  # the connection ended during an answer
        finally:
            if watching.done() and not watching.cancelled():
                cause, reason = HandoffCause.PEER_LOST, watching.result()
            watching.cancel()
            self._fail_pending_digests()
            await asyncio.gather(*self._placing, return_exceptions=True)  # each has reported to its session
            events.link_down(self, cause, reason)

    async def _watch(self) -> str:
        """Closes the link when it stalls; returns the reason."""
        try:
            await self.watch.run(self.stream)
        except HandoffFault as fault:
            log.warning("link from %s rank %d stalled: %s", self.hello.worker_id, self.hello.rank, fault.message)
            self.close()
            return fault.message

    async def _settle(self, left: int = 0) -> None:
        """Waits until at most `left` pieces are being written. Raises HandoffFault, after which the link must end."""
        while len(self._placing) > left:
            await self._placing.popleft()

    async def _take(self, events: InLinkEvents, header: Header, body: bytes) -> None:
        if header.type not in (FrameType.PIECE, FrameType.DIGEST, FrameType.HEARTBEAT):
            await self._settle()  # the answer to an abort promises that nothing is read any more
        match header.type:
            case FrameType.PIECE if header.piece is not None:
                self.watch.moved()
                self.is_taking = True
                try:
                    await self._take_piece(events, header.ticket_id, header.piece, body)
                finally:
                    self.is_taking = False
            case FrameType.DIGEST:
                self._take_digest(header)
            case FrameType.OPEN:
                events.link_open(self, header.ticket_id, body)
            case FrameType.FINISH:
                events.link_finish(self, header.ticket_id, header.seq)
            case FrameType.ABORT:
                events.link_abort(self, header.ticket_id)
                self.reply(FrameType.ABORTED, header.ticket_id)
            case FrameType.IDLE:
                self.is_resting = True
            case FrameType.HEARTBEAT:  # `run` tells the watch
                if (session := events.link_session(self, header.ticket_id)) is not None:
                    session.still_computing()
            case FrameType.PROBE:  # later probes measure latency; the first was answered before link_up
                await self.probed()
            case _:
                raise protocol_fault(f"expected a sender's frame, got {header.type.name}")

    async def probed(self) -> None:
        self.stream.send(Header(FrameType.PROBED, digest=await self.receiver.receive_probe()))

    async def _take_piece(self, events: InLinkEvents, ticket_id: str, piece: Piece, body: bytes) -> None:
        if not self.receiver.places_ahead:
            await self._settle()
        hello = self.hello
        check_size(piece, self.local.layout, self.link.head_count, int8=hello.int8, max_bytes=self.max_piece_bytes)
        if piece.head_start < self.link.head_start or (
            piece.head_start + piece.head_count > self.link.head_start + self.link.head_count
        ):
            raise protocol_fault(f"piece {piece.seq} has heads outside this link")
        arrival = await self.receiver.fetch(piece, body)
        followed = self._expect_digest(ticket_id, piece) if arrival.digest_follows else None
        wire_bytes, piece = piece.payload_bytes, as_in_pool(piece, self.local.layout)
        session = events.link_session(self, ticket_id)
        if session is None:
            if not events.has_ticket(ticket_id):
                raise protocol_fault(f"piece {piece.seq} is for an unknown ticket")
            self.fail(ticket_id, HandoffCause.REFUSED_TICKET, "no such ticket is open on this link")
            await arrival.discard()
            return
        try:
            span = session.begin_piece(self.hello.rank, piece)
        except HandoffFault as fault:
            events.link_fault(self, ticket_id, fault, writing=False)
            await arrival.discard()
            return
        placing = self._place(events, ticket_id, piece, wire_bytes, arrival.place(span), followed)
        if wire_bytes <= INLINE_BYTES:
            await placing
            return
        task = asyncio.create_task(placing)
        task.add_done_callback(self._placed)
        self._placing.append(task)
        await asyncio.sleep(0)  # starts it before the next frame is handled
        await self._settle(left=PLACES_AHEAD)

    def _expect_digest(self, ticket_id: str, piece: Piece) -> asyncio.Future[int]:
        if len(self._pending_digests) > PLACES_AHEAD:  # bounds memory: digests of refused pieces count too
            raise protocol_fault(f"expected the digests of {PLACES_AHEAD} pieces before piece {piece.seq}")
        followed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending_digests.append((ticket_id, piece.seq, followed))
        return followed

    def _take_digest(self, header: Header) -> None:
        if (
            not self._pending_digests
            or header.digest is None
            or self._pending_digests[0][:2] != (header.ticket_id, header.seq)
        ):
            raise protocol_fault(f"unexpected digest of piece {header.seq}")
        *_, followed = self._pending_digests.popleft()
        followed.set_result(header.digest)

    def _fail_pending_digests(self) -> None:
        for *_, followed in self._pending_digests:
            if not followed.done():
                lost = HandoffFault(HandoffCause.PEER_LOST, "the connection ended before the digest of a piece arrived")
                followed.set_exception(lost)
                followed.exception()  # marks it as retrieved: a refused piece's digest has no waiter
        self._pending_digests.clear()

    async def _place(
        self,
        events: InLinkEvents,
        ticket_id: str,
        piece: Piece,
        wire_bytes: int,
        placing: Coroutine[None, None, int],
        followed: asyncio.Future[int] | None,
    ) -> None:
        """Completes one write and reports it to its session. Raises HandoffFault, after which the link must end."""
        started_s = time.perf_counter()
        try:
            digest = await placing
            if followed is not None:
                digest ^= await followed
        except HandoffFault as fault:
            events.link_fault(self, ticket_id, fault, writing=True)
            raise
        except (MemoryError, RuntimeError, ValueError, OSError, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the agent is ending, and the write may continue
            # A CancelledError here comes from the link's thread, whose queue was closed.
            failed = HandoffFault(HandoffCause.TRANSPORT, f"piece {piece.seq} could not be written: {error}")
            events.link_fault(self, ticket_id, failed, writing=True)
            raise failed from error
        self.watch.moved()
        self.moved_bytes += wire_bytes
        ended_s = time.perf_counter()
        writing_s = ended_s - max(started_s, self._placed_at_s)  # without the wait for the previous piece
        self._placed_at_s = ended_s
        events.link_written(self, ticket_id, piece, digest, writing_s)

    def _placed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.stream.close()  # ends `run` even if no further frame arrives


class LinkAcceptor:
    """Handles connections to the agent's two listeners."""

    def __init__(
        self, local: LocalRank, transports: Transports, events: InLinkEvents, report: Callable[[LinkReport], None]
    ) -> None:
        self._local = local
        self._transports = transports
        self._events = events
        self._report = report

    async def accept(self, raw: socket.socket) -> None:
        """Serves one connection to its end. An error ends only this connection."""
        thread: LinkThread | None = None
        fds: list[int] = []
        wire: Wire = raw
        try:
            with raw:
                if raw.family == socket.AF_UNIX and not peer_is_same_user(raw):
                    return
                if raw.family != socket.AF_UNIX:
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._local.tls is not None:
                        wire = await TlsConnection.accept(raw.dup(), self._local.tls)
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    body, fds = await receive_first(wire)
                hello = parse_hello(body)
                thread = self._transports.thread(f"link-{hello.worker_id}-{hello.rank}")
                link = await self._welcome(wire, hello, fds, thread)
            if link is not None:
                await self._run(link)
        except (HandoffFault, OSError, TimeoutError) as error:
            log.info("a link's connection failed before it was ready: %s", str(error) or type(error).__name__)
        finally:
            if isinstance(wire, TlsConnection):
                wire.close()
            for fd in fds:
                os.close(fd)
            if thread is not None:
                thread.close()

    async def _welcome(self, raw: Wire, hello: Hello, fds: list[int], thread: LinkThread) -> InLink | None:
        """The link after its handshake; None if it was refused permanently."""
        local, attach = self._local, self._local.attach
        digests = attach.digests or hello.digests
        try:
            link = check_hello(hello, local)
            if (hello.transport == MAPPED) != (raw.family == socket.AF_UNIX):
                raise protocol_fault(f"transport: {hello.transport} cannot use this kind of socket")
            receiver = await self._transports.receiver(local, hello, link, thread, digests=digests)
            terms = await receiver.prepare(fds)
        except (HandoffFault, IncompatiblePools, IncompatibleVersions) as error:
            if isinstance(error, HandoffFault) and error.cause is HandoffCause.TRANSPORT:
                raise  # may succeed next time; only permanent failures are refused
            cause = error.cause if isinstance(error, HandoffFault) else HandoffCause.TRANSPORT
            log.warning("refused a link from %s rank %d: %s", hello.worker_id, hello.rank, error)
            await send_first(raw, encode(Refused(cause.value, error.message)), [])
            return None
        try:
            welcome = Welcome(attach.worker_id, attach.epoch, attach.rank, digests, **terms._asdict())
            await send_first(raw, encode(welcome), [])
            await receiver.establish()
            stream = await self._transports.frames(raw if isinstance(raw, TlsConnection) else raw.dup())
            stream.version = hello.protocol
        except BaseException:
            receiver.close()
            raise
        limit = max_piece_bytes(hello.transport, hello.protocol, terms.max_piece_bytes)
        return InLink(local, hello, link, stream, receiver, thread, limit)

    async def _run(self, link: InLink) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                frame = await link.stream.receive()
            if frame is None or frame[0].type is not FrameType.PROBE:
                raise protocol_fault("expected a probe first")
            await link.probed()
            link.thread.moves_pieces = True
            self._events.link_up(link)
            await link.run(self._events)
        finally:
            link.close()
