"""The second connection of a `tcp` link, which carries only the bytes of pieces.

It blocks: only the link's thread uses it, and `close` from any thread wakes that thread. The receiver listens on a
separate port and accepts the connection that presents the token of the welcome.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.sockets import connect_tcp, listen_tcp, readable, serve, writable
from tandem.rpc.tls import TlsContexts

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKEN_TIMEOUT_S = 5.0
ESTABLISH_TIMEOUT_S = 10.0
BUFFER_BYTES = 4 << 20
MAX_PENDING = 64
_TIMEVAL = struct.Struct("@ll")
T = TypeVar("T")


class DataSocket:
    """Takes over a connected socket, plain or TLS.

    Args:
        idle_s: timeout without any byte moved while data is expected.

    `waiting`, if set, is entered while a thread waits for the peer before it moves bytes.
    """

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(idle_s)
        else:  # kernel timeouts, because Python's cost a poll per call
            sock.setblocking(True)
            seconds, rest = divmod(round(idle_s * 1e6), 1_000_000)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, rest))
        self._sock = sock
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._in_use = False
        self._closed = False

    async def readable(self) -> None:
        """Waits on the loop for the first byte, so that no thread waits for a sender that is not ready. Raises
        HandoffFault like `receive`."""
        with self._use() as sock:
            if not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
                async with asyncio.timeout(self._idle_s):
                    await readable(sock)

    def send(self, views: list[memoryview]) -> None:
        """Raises HandoffFault (transport, peer_lost), after which the link must end."""
        with self._use() as sock:
            if isinstance(sock, ssl.SSLSocket):
                for view in views:
                    sock.sendall(view)
                return
            rest = views
            while rest:
                self._await(sock, select.POLLOUT)
                rest = _after(rest, sock.sendmsg(rest))

    def receive(self, views: list[memoryview]) -> None:
        """Fills all of `views`. Raises HandoffFault (transport, peer_lost), after which the link must end."""
        with self._use() as sock:
            rest = views
            while rest:
                if isinstance(sock, ssl.SSLSocket):
                    count = sock.recv_into(rest[0])
                else:
                    self._await(sock, select.POLLIN)
                    count = sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]  # one wake-up for all bytes
                if not count:
                    raise ConnectionError("the peer closed the connection")
                if self._closed:  # a TLS socket could still return buffered data
                    raise ConnectionError("the link was closed")
                rest = _after(rest, count)

    def _await(self, sock: socket.socket, event: int) -> None:
        """Waits until some bytes can be moved. Raises TimeoutError."""
        poll = select.poll()
        poll.register(sock, event)
        if poll.poll(0):
            return
        with self.waiting():
            if not poll.poll(1000 * self._idle_s):
                raise TimeoutError

    def close(self) -> None:
        """Closes from any thread. The descriptor is released after its last use, so that its number is not reused too
        early."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # SSLSocket.shutdown would undo TLS
            except OSError:
                pass  # the peer closed first
            if not self._in_use:
                self._sock.close()

    @contextmanager
    def _use(self) -> Iterator[socket.socket]:
        with self._lock:
            if self._closed:
                raise HandoffFault(HandoffCause.TRANSPORT, "tcp: the link is closed")
            self._in_use = True
        try:
            yield self._sock
        except (TimeoutError, BlockingIOError) as error:
            raise HandoffFault(
                HandoffCause.TRANSPORT, f"tcp: no byte moved for {self._idle_s:g} s inside a piece"
            ) from error
        except OSError as error:
            raise HandoffFault(HandoffCause.PEER_LOST, f"tcp: the data connection ended: {error}") from error
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._sock.close()


class DataListener:
    """Listens for one link's data connection.

    Args:
        host: address of a named interface of this host.
    """

    def __init__(self, host: str, tls: TlsContexts | None) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._tls = tls
        self._listener = listen_tcp(host)
        _enlarge_buffers(self._listener)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def admit(self, idle_s: float) -> DataSocket:
        """Returns the first connection that presents the token, drops all others, and stops listening.

        Raises:
            HandoffFault: (transport) timeout.
        """
        found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        async def handle(raw: socket.socket) -> None:
            try:
                async with asyncio.timeout(TOKEN_TIMEOUT_S):
                    sock = await self._identify(raw)
            except (HandoffFault, OSError, TimeoutError) as error:
                log.info("dropped a data connection: %s", str(error) or type(error).__name__)
                return
            if found.done():
                sock.close()
            else:
                found.set_result(sock)

        serving = asyncio.create_task(serve(self._listener, handle, MAX_PENDING))
        try:
            async with asyncio.timeout(ESTABLISH_TIMEOUT_S):
                return DataSocket(await found, idle_s)
        except TimeoutError as error:
            what = f"tcp: no data connection arrived within {ESTABLISH_TIMEOUT_S:g} s"
            raise HandoffFault(HandoffCause.TRANSPORT, what) from error
        finally:
            found.cancel()
            serving.cancel()

    async def _identify(self, raw: socket.socket) -> socket.socket:
        """The socket, after it presented the token; closed otherwise."""
        sock = raw
        try:
            if self._tls is not None:
                sock = self._tls.server.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
                await _retry_nonblocking(sock, sock.do_handshake)
                self._tls.check_peer(sock)
            shown = bytearray()
            while len(shown) < TOKEN_BYTES:
                missing = TOKEN_BYTES - len(shown)
                part = await _retry_nonblocking(sock, lambda missing=missing: sock.recv(missing))  # type: ignore[misc]
                if not part:
                    raise protocol_fault("it closed before it presented a token")
                shown += part
            if not hmac.compare_digest(shown, self.token):
                raise protocol_fault("it presented a wrong token")
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self._listener.close()


async def connect_data(address: str, token: bytes, tls: TlsContexts | None, idle_s: float) -> DataSocket:
    """Raises HandoffFault (transport)."""
    try:
        async with asyncio.timeout(ESTABLISH_TIMEOUT_S):
            sock = await connect_tcp(address)
            try:
                _enlarge_buffers(sock)
                if tls is not None:
                    sock = tls.client.wrap_socket(sock, do_handshake_on_connect=False)
                    await _retry_nonblocking(sock, sock.do_handshake)
                    tls.check_peer(sock)
                await _retry_nonblocking(sock, lambda: sock.send(token))  # fits into the empty send buffer
            except BaseException:
                sock.close()
                raise
    except (OSError, TimeoutError) as error:
        what = f"tcp: no data connection to {address}: {str(error) or type(error).__name__}"
        raise HandoffFault(HandoffCause.TRANSPORT, what) from error
    return DataSocket(sock, idle_s)


async def _retry_nonblocking(sock: socket.socket, operation: Callable[[], T]) -> T:
    """Repeats a non-blocking operation, plain or TLS, until it completes."""
    while True:
        try:
            return operation()
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(sock)
        except ssl.SSLWantWriteError:
            await writable(sock)


def _enlarge_buffers(sock: socket.socket) -> None:
    """Enlarges the socket's buffers if the system allows the full size. A fixed size disables the kernel's own
    tuning."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        try:
            allowed = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if allowed >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """`views` without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
