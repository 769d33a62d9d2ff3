"""The sending end of a link: connect, handshake, probe, then send frames and pieces; reconnect on failure.

connecting ──probe passed──▶ ready ──connection ended──▶ down ──backoff──▶ connecting
    │                          └──── not used ─────────▶ idle ──needed───▶ connecting
    └── refused: for as long as both epochs last

Under `auto`, a link that fails to open twice with one transport is opened with the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import MAPPED, LinkRefused, LocalRank, Welcome, make_hello, receive_answer
from kvtransfer.connection.sockets import connect_tcp, connect_unix, send_first
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import TlsConnection, Wire
from kvtransfer.control import LinkReport, LinkState, Peer
from kvtransfer.link.liveness import LinkWatch
from kvtransfer.link.meter import LinkMeter
from kvtransfer.link.ticket_queue import TicketQueue
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.session.piece import MAX_PIECE_BYTES, FrameType, Header, Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.choice import choose_transport
from kvtransfer.transports.factory import Transports, carries_int8, max_piece_bytes
from kvtransfer.transports.protocol import KvSender
from kvtransfer.versions import has_heartbeats, has_many_probes
from tandem.backoff import Backoff
from tandem.clock import SystemClock
from tandem.errors import IncompatiblePools, IncompatibleVersions
from tandem.rpc.channel import encode

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 60.0  # the peer may load torch first
MIN_WINDOW_BYTES = 2 * MAX_PIECE_BYTES  # unacknowledged bytes: enough to keep the link busy; tickets share it here
MAX_WINDOW_BYTES = 16 * MAX_PIECE_BYTES
MIN_WINDOW_PIECES, MAX_WINDOW_PIECES = 0.5, 4  # of the link's largest, if that is more
WINDOW_S = 0.02  # of a fast link's throughput, to cover delays in scheduling the agents
PROBES = 5
OPENINGS = 2  # failed in a row with one transport, before `auto` takes the next


class OutLinkEvents(Protocol):
    def link_ready(self, link: OutLink) -> None: ...
    def link_frame(self, link: OutLink, header: Header, body: bytes) -> None: ...
    def link_down(self, link: OutLink, cause: HandoffCause, reason: str, *, final: bool) -> None:
        """The connection ended or failed. `final`: there will be no retry."""
        ...


@dataclass(frozen=True, slots=True)
class _Frame:
    header: Header
    body: bytes


@dataclass(frozen=True, slots=True)
class _Push:
    wanted: Callable[[], bool]
    ticket_id: str
    piece: Piece
    span: PoolSpan


class OutLink:
    def __init__(
        self,
        local: LocalRank,
        peer: Peer,
        link: PlannedLink,
        transports: Transports,
        events: OutLinkEvents,
        report: Callable[[LinkReport], None],
        opening: asyncio.Semaphore,
    ) -> None:
        self.peer = peer
        self.used_s = 0.0  # when a ticket last used it, on the owner's clock
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.moved_bytes = 0
        self.is_wanted = True
        self.max_piece_bytes = MAX_PIECE_BYTES
        self._meter = LinkMeter(SystemClock())
        self._is_opening = False  # an error now is the transport's
        self._failed_openings: dict[str, tuple[int, str]] = {}  # by transport: how many, and the last one's reason
        self._local = local
        self._link = link
        self._transports = transports
        self._events = events
        self._report = report
        self._kind = ""
        self._jobs = TicketQueue(self._may_send)
        self._watch = LinkWatch(self._is_moving)
        self._backoff = Backoff(first_s=0.1, most_s=2.0)
        self._opening = opening
        self._is_needed = asyncio.Event()
        self._is_resting = False

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def is_refused(self) -> bool:
        return self.state is LinkState.REFUSED

    def need(self, now_s: float) -> None:
        """A ticket needs the link: opens it if it is idle."""
        self.used_s = now_s
        self._is_needed.set()

    def rest(self) -> None:
        """Closes a ready link until it is needed. No ticket may use it."""
        self._is_needed.clear()
        self._is_resting = True
        self._enter(LinkState.IDLE, self.reason)
        self.send(Header(FrameType.IDLE))

    def send(self, header: Header, body: bytes = b"") -> None:
        """Queues a frame behind the pieces of its ticket."""
        self._jobs.put(header.ticket_id, _Frame(header, body))

    def push(self, wanted: Callable[[], bool], ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """Queues a piece. It is dropped if `wanted` returns False when its turn comes."""
        self._jobs.put(ticket_id, _Push(wanted, ticket_id, piece, span))

    def report(self) -> None:
        if not self.is_wanted:
            return  # it was already reported as closed
        peer, meter = self.peer, self._meter
        self._report(
            LinkReport(
                peer.worker_id, peer.epoch, peer.rank, self._kind, self.state, self.reason, self.moved_bytes,
                meter.latency_s, meter.bytes_per_s,
            )
        )  # fmt: skip

    async def run(self) -> None:
        """Runs until the link is refused, or cancelled when the peer leaves the directory."""
        while True:
            try:
                await self._connect()
                if self._is_resting:
                    await self._is_needed.wait()
                    continue
                reason, final = "the connection ended", False
            except (IncompatiblePools, IncompatibleVersions) as refused:
                reason, final = refused.message, True
            except HandoffFault as fault:
                reason, final = fault.message, False
            except (OSError, ValueError, TimeoutError) as error:
                name = f"{self.peer.worker_id} rank {self.peer.rank}"
                reason = f"cannot reach {name}: {str(error) or type(error).__name__}"
                final = isinstance(error, ssl.SSLCertVerificationError)
            except Exception as error:  # a transport's library may raise anything; only this link fails
                log.exception("link to %s rank %d", self.peer.worker_id, self.peer.rank)
                reason, final = f"{type(error).__name__}: {error}", False
            except asyncio.CancelledError:
                self._enter(LinkState.DOWN, "the peer left the directory")
                raise
            if self._is_opening and not final:
                count, _ = self._failed_openings.get(self._kind, (0, ""))
                self._failed_openings[self._kind] = (count + 1, reason)
            self._enter(LinkState.REFUSED if final else LinkState.DOWN, reason)
            cause = HandoffCause.TRANSPORT if final else HandoffCause.PEER_LOST
            self._events.link_down(self, cause, reason, final=final)
            if final:
                return
            await self._backoff.wait()

    def _enter(self, state: LinkState, reason: str) -> None:
        self.state, self.reason = state, reason
        self.report()

    def _given_up(self) -> dict[str, str]:
        """Transports that failed to open, as `choose_transport` takes them. They stay so while both epochs last."""
        return {
            kind: f"{count} openings failed, the last with: {reason}: mend that and restart the worker, or set another "
            "transfer.transport"
            for kind, (count, reason) in self._failed_openings.items()
            if count >= OPENINGS
        }

    async def _connect(self) -> None:
        """Returns or raises when the connection ends."""
        peer = self.peer
        self._is_resting = False
        self._enter(LinkState.CONNECTING, self.reason)
        self._is_opening = False
        self._kind, reason = choose_transport(self._local, peer, self._transports.host, self._given_up())
        self._is_opening = True
        thread = self._transports.thread(f"link-{peer.worker_id}-{peer.rank}")
        sender: KvSender | None = None
        stream: FrameStream | None = None
        turn = AsyncExitStack()
        try:
            if not self._is_needed.is_set():
                await turn.enter_async_context(self._opening)
            sender = await self._transports.sender(self._kind, self._local, peer, thread)
            stream = await self._handshake(sender)
            self._meter.reconnected()
            for _ in range(PROBES if has_many_probes(stream.version) else 1):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await self._probe(sender, stream)
            self._jobs = TicketQueue(self._may_send)
            self._watch = LinkWatch(self._is_moving, is_held_up=lambda: thread.is_held_up)
            thread.moves_pieces = True
            self._backoff.reset()
            await turn.aclose()
            self._is_opening = False
            self._failed_openings.pop(self._kind, None)
            self._enter(LinkState.READY, reason)
            if reason:
                log.warning("link to %s rank %d over %s only: %s", peer.worker_id, peer.rank, self._kind, reason)
            self._events.link_ready(self)
            await self._pump(sender, stream)
        finally:
            await turn.aclose()
            if stream is not None:
                stream.close()
            if sender is not None:
                sender.close()
            thread.close()

    async def _handshake(self, sender: KvSender) -> FrameStream:
        peer = self.peer
        self._is_opening = False  # a peer that cannot be reached, or is silent, shows nothing of its transport
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            raw = await self._dial()
        self._is_opening = True
        fds: list[int] = []
        try:
            fds = sender.hello_fds()
            hello = make_hello(
                self._local, peer, self._link, self._kind, int8=carries_int8(self._kind, self._local, peer)
            )
            await send_first(raw, encode(hello), fds)
            welcome = await self._answer(raw)
            if (welcome.worker_id, welcome.epoch, welcome.rank) != (peer.worker_id, peer.epoch, peer.rank):
                raise LinkRefused(f"another epoch answered: {welcome.worker_id}, epoch {welcome.epoch}")
            self.max_piece_bytes = max_piece_bytes(self._kind, hello.protocol, welcome.max_piece_bytes)
            await self._establish(sender, welcome)
        except BaseException:
            raw.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        stream = await self._transports.frames(raw)
        stream.version = hello.protocol
        return stream

    async def _answer(self, raw: Wire) -> Welcome:
        try:
            return await receive_answer(raw, HANDSHAKE_TIMEOUT_S)
        except TimeoutError:
            self._is_opening = False
            raise

    async def _establish(self, sender: KvSender, welcome: Welcome) -> None:
        limit = asyncio.timeout(HANDSHAKE_TIMEOUT_S)
        try:
            async with limit:
                await sender.establish(welcome)
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"{self._kind}: the data path was not ready within {HANDSHAKE_TIMEOUT_S:g} s"
            raise HandoffFault(HandoffCause.TRANSPORT, message) from error

    async def _dial(self) -> Wire:
        if self._kind == MAPPED:
            return await connect_unix(self.peer.mapped_path)
        raw = await connect_tcp(self.peer.tcp_address)
        return raw if self._local.tls is None else await TlsConnection.connect(raw, self._local.tls)

    async def _probe(self, sender: KvSender, stream: FrameStream) -> None:
        started_s = time.monotonic()
        digest = await sender.send_probe(stream)
        header = Header(FrameType.HEARTBEAT)
        while header.type is FrameType.HEARTBEAT:  # the receiving end sends heartbeats since the first probe
            answer = await stream.receive()
            if answer is None:
                raise protocol_fault("the connection ended during the probe")
            header, _ = answer
        if header.type is not FrameType.PROBED:
            raise protocol_fault(f"expected the probe's answer, got {header.type.name}")
        if header.digest != digest:
            raise LinkRefused(f"the probe was corrupted over {self._kind}")
        self._meter.probed(time.monotonic() - started_s)

    async def _pump(self, sender: KvSender, stream: FrameStream) -> None:
        """Sends and receives until either task ends."""
        works = (self._send_jobs(sender, stream), self._read(stream), self._watch.run(stream))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _send_jobs(self, sender: KvSender, stream: FrameStream) -> None:
        """Returns after the frame that closes the link."""
        while True:
            match await self._jobs.get():
                case _Frame(Header(type=FrameType.HEARTBEAT), _) if not has_heartbeats(stream.version):
                    pass
                case _Frame(header, body):
                    await sender.settle()
                    stream.send(header, body)
                    if header.type is FrameType.IDLE:
                        return
                case _Push(wanted, ticket_id, piece, span) if wanted():
                    if not self._is_moving():
                        self._watch.moved()
                    self._meter.pushed(ticket_id, piece.seq, piece.payload_bytes)
                    self.moved_bytes += piece.payload_bytes  # before the acknowledgement, which may end the ticket
                    await sender.push(stream, ticket_id, piece, span)

    async def _read(self, stream: FrameStream) -> None:
        async for header, body in stream.frames():
            if header.type is FrameType.HEARTBEAT:
                self._watch.heard(is_peer_held_up=header.seq > 0)
                continue
            self._update_window(header)
            self._events.link_frame(self, header, body)

    # --- the window ----------------------------------------------------------------------------------------------

    def _may_send(self, job: _Frame | _Push) -> bool:
        least = max(MIN_WINDOW_BYTES, MIN_WINDOW_PIECES * self.max_piece_bytes)
        most = max(MAX_WINDOW_BYTES, MAX_WINDOW_PIECES * self.max_piece_bytes)
        moved_bytes = WINDOW_S * (self._meter.bytes_per_s or 0.0)
        full = self._meter.in_flight_bytes >= min(max(least, moved_bytes), most)
        return not (full and isinstance(job, _Push) and job.wanted())

    def _update_window(self, header: Header) -> None:
        """Updates the window. After a failure or an abort, no acknowledgement of the ticket follows."""
        if header.type is FrameType.ACK:
            self._meter.acknowledged(header.ticket_id, header.seq)
        elif header.type in (FrameType.FAIL, FrameType.ABORTED):
            self._meter.dropped(header.ticket_id)
        else:
            self._watch.heard()
            return
        self._watch.moved()
        self._jobs.wake()

    def _is_moving(self) -> bool:
        return self._meter.in_flight_bytes > 0
