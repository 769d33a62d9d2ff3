"""The receiving end of a link: check the hello, answer, then take frames in order, one piece at a time.

A link ends by its connection ending, never in the middle of a write: whoever wants it gone closes the stream.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.control import LinkReport
from kvtransfer.handshake import Hello, Own, Refused, Welcome, check_hello, parse_hello
from kvtransfer.piece import FrameType, Header, Piece, check_size, failure_body
from kvtransfer.receive_session import ReceiveSession
from kvtransfer.reshard import Link
from kvtransfer.sockets import peer_is_same_user, receive_first, send_first
from kvtransfer.stream import FrameStream
from kvtransfer.tls import TlsConnection, Wire
from kvtransfer.transports.factory import MAPPED, Transports
from kvtransfer.transports.protocol import KvReceiver, LinkThread
from tandem.channel import encode
from tandem.errors import IncompatiblePools

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 60.0  # the sender may have to load torch first


class InLinkEvents(Protocol):
    def link_up(self, link: InLink) -> None: ...
    def link_open(self, link: InLink, ticket_id: str, signed: bytes) -> None: ...
    def link_session(self, link: InLink, ticket_id: str) -> ReceiveSession | None:
        """The session that accepted this link, if it still takes pieces."""
        ...

    def link_written(self, link: InLink, ticket_id: str, piece: Piece, digest: int, verify_s: float) -> None: ...
    def link_fault(self, link: InLink, ticket_id: str, fault: HandoffFault, *, writing: bool) -> None:
        """This ticket cannot go on; `writing`: and a write that had begun ended without its piece."""
        ...

    def link_finish(self, link: InLink, ticket_id: str, pieces: int) -> None: ...
    def link_abort(self, link: InLink, ticket_id: str) -> None: ...
    def link_down(self, link: InLink, cause: HandoffCause, reason: str) -> None: ...


@dataclass(slots=True)
class InLink:
    """One that shook hands and was probed."""

    own: Own
    hello: Hello
    link: Link
    stream: FrameStream
    receiver: KvReceiver
    moved_bytes: int = 0

    def reply(self, kind: FrameType, ticket_id: str, seq: int = 0, body: bytes = b"") -> None:
        self.stream.send(Header(kind, ticket_id, seq=seq), body)

    def fail(self, ticket_id: str, cause: HandoffCause, message: str) -> None:
        self.reply(FrameType.FAIL, ticket_id, body=failure_body(cause, message))

    def close(self) -> None:
        """The running loop ends after the write that is under way."""
        self.stream.close()
        self.receiver.close()

    def report(self, state: str, reason: str) -> LinkReport:
        hello = self.hello
        return LinkReport(hello.worker_id, hello.epoch, hello.rank, hello.transport, state, reason, self.moved_bytes)

    async def run(self, events: InLinkEvents) -> None:
        """Until the connection ends."""
        cause, reason = HandoffCause.PEER_LOST, "the sender's connection ended"
        try:
            async for header, body in self.stream.frames():
                await self._take(events, header, body)
        except HandoffFault as fault:
            cause, reason = fault.cause, fault.message
            log.warning("link from %s rank %d ends: %s", self.hello.worker_id, self.hello.rank, reason)
        finally:
            events.link_down(self, cause, reason)

    async def _take(self, events: InLinkEvents, header: Header, body: bytes) -> None:
        match header.type:
            case FrameType.PIECE if header.piece is not None:
                await self._take_piece(events, header.ticket_id, header.piece, body)
            case FrameType.OPEN:
                events.link_open(self, header.ticket_id, body)
            case FrameType.FINISH:
                events.link_finish(self, header.ticket_id, header.seq)
            case FrameType.ABORT:
                events.link_abort(self, header.ticket_id)
                self.reply(FrameType.ABORTED, header.ticket_id)
            case _:
                raise protocol_fault(f"expected a sender's frame, got {header.type.name}")

    async def _take_piece(self, events: InLinkEvents, ticket_id: str, piece: Piece, body: bytes) -> None:
        check_size(piece, self.own.layout, self.link.head_count)
        if piece.head_start < self.link.head_start or (
            piece.head_start + piece.head_count > self.link.head_start + self.link.head_count
        ):
            raise protocol_fault(f"piece {piece.seq} has heads that are not this link's")
        arrival = await self.receiver.fetch(piece, body)
        session = events.link_session(self, ticket_id)
        if session is None:
            self.fail(ticket_id, HandoffCause.REFUSED_TICKET, "no such ticket is open on this link")
            await arrival.discard()
            return
        try:
            span = session.begin_piece(self.hello.rank, piece)
        except HandoffFault as fault:
            events.link_fault(self, ticket_id, fault, writing=False)
            await arrival.discard()
            return
        started_s = time.perf_counter()
        try:
            digest = await arrival.place(span)
        except HandoffFault as fault:
            events.link_fault(self, ticket_id, fault, writing=True)
            raise
        except (MemoryError, RuntimeError, ValueError, OSError) as error:  # the write is over, however it ended
            failed = HandoffFault(HandoffCause.TRANSPORT, f"piece {piece.seq} could not be written: {error}")
            events.link_fault(self, ticket_id, failed, writing=True)
            raise failed from error
        self.moved_bytes += piece.payload_bytes
        events.link_written(self, ticket_id, piece, digest, time.perf_counter() - started_s)


class LinkAcceptor:
    """What the agent's two listeners do with a connection."""

    def __init__(
        self, own: Own, transports: Transports, events: InLinkEvents, report: Callable[[LinkReport], None]
    ) -> None:
        self._own = own
        self._transports = transports
        self._events = events
        self._report = report

    async def accept(self, raw: socket.socket) -> None:
        """One connection, to its end. Whatever comes, only this connection suffers."""
        thread: LinkThread | None = None
        fds: list[int] = []
        wire: Wire = raw
        try:
            with raw:
                if raw.family == socket.AF_UNIX and not peer_is_same_user(raw):
                    return
                if raw.family != socket.AF_UNIX:
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._own.tls is not None:
                        wire = await TlsConnection.accept(raw.dup(), self._own.tls)
                body, fds = await asyncio.wait_for(receive_first(wire), HELLO_TIMEOUT_S)
                hello = parse_hello(body)
                thread = LinkThread(f"link-{hello.worker_id}-{hello.rank}")
                link = await self._welcome(wire, hello, fds, thread)
            if link is not None:
                await self._run(link)
        except (HandoffFault, OSError, TimeoutError) as error:
            log.info("a link's connection ended before it was ready: %s", error or type(error).__name__)
        finally:
            if isinstance(wire, TlsConnection):
                wire.close()
            for fd in fds:
                os.close(fd)
            if thread is not None:
                thread.close()

    async def _welcome(self, raw: Wire, hello: Hello, fds: list[int], thread: LinkThread) -> InLink | None:
        """The link after its handshake; None when it was refused for good."""
        own, attach = self._own, self._own.attach
        digests = attach.digests or hello.digests
        try:
            link = check_hello(hello, own)
            if (hello.transport == MAPPED) != (raw.family == socket.AF_UNIX):
                raise protocol_fault(f"transport: {hello.transport} does not go over this kind of socket")
            receiver = await self._transports.receiver(own, hello, link, thread, digests=digests)
            port, token = await receiver.prepare(fds) or (None, b"")
        except (HandoffFault, IncompatiblePools) as error:
            cause = error.cause if isinstance(error, HandoffFault) else HandoffCause.TRANSPORT
            log.warning("refused a link from %s rank %d: %s", hello.worker_id, hello.rank, error)
            await send_first(raw, encode(Refused(cause.value, error.message)), [])
            return None
        try:
            welcome = Welcome(attach.worker_id, attach.epoch, attach.rank, digests, port, token)
            await send_first(raw, encode(welcome), [])
            await receiver.establish()
            stream = await self._transports.frames(raw if isinstance(raw, TlsConnection) else raw.dup())
            stream.version = hello.protocol
        except BaseException:
            receiver.close()
            raise
        return InLink(own, hello, link, stream, receiver)

    async def _run(self, link: InLink) -> None:
        try:
            frame = await asyncio.wait_for(link.stream.receive(), PROBE_TIMEOUT_S)
            if frame is None or frame[0].type is not FrameType.PROBE:
                raise protocol_fault("expected a probe first")
            digest = await link.receiver.receive_probe()
            link.stream.send(Header(FrameType.PROBED, digest=digest))
            self._events.link_up(link)
            await link.run(self._events)
        finally:
            link.close()
