"""The second connection of a `tcp` link, which carries nothing but the bytes of pieces. Blocking: it is used from the
link's thread only, and `close` from anywhere wakes that thread.

Its receiver opens a door on a port of its own for it and lets in the one that shows the token of the welcome.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        idle_s: a peer that moves no byte for so long while one is expected is given up.
    """

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(idle_s)
        else:  # the kernel's own timeouts: Python's would cost a poll for each call
            sock.setblocking(True)
            seconds, rest = divmod(round(idle_s * 1e6), 1_000_000)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, rest))
        self._sock = sock
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._in_use = False
        self._closed = False

    def send(self, views: list[memoryview]) -> None:
        """Raises HandoffFault (transport, peer_lost): then the link must end."""
        with self._use() as sock:
            if isinstance(sock, ssl.SSLSocket):
                for view in views:
                    sock.sendall(view)
                return
            rest = views
            while rest:
                rest = _after(rest, sock.sendmsg(rest))

    def receive(self, views: list[memoryview]) -> None:
        """Fills all of `views`. Raises HandoffFault (transport, peer_lost): then the link must end."""
        with self._use() as sock:
            rest = views
            while rest:
                if isinstance(sock, ssl.SSLSocket):
                    count = sock.recv_into(rest[0])
                else:
                    count = sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]  # one waking for all
                if not count:
                    raise ConnectionError("the peer closed it")
                if self._closed:  # a TLS socket might go on with what it had read before
                    raise ConnectionError("the link was closed")
                rest = _after(rest, count)

    def close(self) -> None:
        """From any thread. The descriptor goes when nothing uses it any more, so that it cannot become another's."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # SSLSocket's own would turn it into a plain one
            except OSError:
                pass  # the peer was faster
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
                HandoffCause.TRANSPORT, f"tcp: the peer moved no byte for {self._idle_s:g} s in the middle of a piece"
            ) from error
        except OSError as error:
            raise HandoffFault(HandoffCause.PEER_LOST, f"tcp: the data connection ended: {error}") from error
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._sock.close()


class DataListener:
    """Where one link's data connection comes in.

    Args:
        host: our own named interface.
    """

    def __init__(self, host: str, tls: TlsContexts | None) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._tls = tls
        self._listener = listen_tcp(host)
        _widen(self._listener)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def admit(self, idle_s: float) -> DataSocket:
        """The first connection that shows the token; all others are dropped, and the door is closed behind it.

        Raises:
            HandoffFault: (transport) none came in time.
        """
        found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        async def visit(raw: socket.socket) -> None:
            try:
                async with asyncio.timeout(TOKEN_TIMEOUT_S):
                    sock = await self._identify(raw)
            except (HandoffFault, OSError, TimeoutError) as error:
                log.info("dropped a data connection: %s", error or type(error).__name__)
                return
            if found.done():
                sock.close()
            else:
                found.set_result(sock)

        serving = asyncio.create_task(serve(self._listener, visit, MAX_PENDING))
        try:
            async with asyncio.timeout(ESTABLISH_TIMEOUT_S):
                return DataSocket(await found, idle_s)
        except TimeoutError as error:
            what = f"tcp: no data connection came within {ESTABLISH_TIMEOUT_S:g} s"
            raise HandoffFault(HandoffCause.TRANSPORT, what) from error
        finally:
            found.cancel()
            serving.cancel()

    async def _identify(self, raw: socket.socket) -> socket.socket:
        """The socket, once it has shown the token; closed otherwise."""
        sock = raw
        try:
            if self._tls is not None:
                sock = self._tls.server.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
                await _attempt(sock, sock.do_handshake)
                self._tls.check_peer(sock)
            shown = bytearray()
            while len(shown) < TOKEN_BYTES:
                missing = TOKEN_BYTES - len(shown)
                part = await _attempt(sock, lambda missing=missing: sock.recv(missing))  # type: ignore[misc]
                if not part:
                    raise protocol_fault("it ended before it showed a token")
                shown += part
            if not hmac.compare_digest(shown, self.token):
                raise protocol_fault("it showed another token")
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
                _widen(sock)
                if tls is not None:
                    sock = tls.client.wrap_socket(sock, do_handshake_on_connect=False)
                    await _attempt(sock, sock.do_handshake)
                    tls.check_peer(sock)
                await _attempt(sock, lambda: sock.send(token))  # a fresh connection's buffer takes it whole
            except BaseException:
                sock.close()
                raise
    except (OSError, TimeoutError) as error:
        what = f"tcp: no data connection to {address}: {error or type(error).__name__}"
        raise HandoffFault(HandoffCause.TRANSPORT, what) from error
    return DataSocket(sock, idle_s)


async def _attempt(sock: socket.socket, operation: Callable[[], T]) -> T:
    """Runs a non-blocking operation, plain or TLS, until it is through."""
    while True:
        try:
            return operation()
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(sock)
        except ssl.SSLWantWriteError:
            await writable(sock)


def _widen(sock: socket.socket) -> None:
    """Large buffers; but a size that we set ends the kernel's own tuning, so not where less is allowed than we want."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        try:
            allowed = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if allowed >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
