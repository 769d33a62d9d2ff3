"""Listening sockets, and the first message of a connection, which may carry file descriptors (SCM_RIGHTS).

asyncio streams cannot receive descriptors. So the first message is read from the raw socket, exactly to its end, before
a stream takes over. The framing is that of `tandem.rpc.channel`.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.tls import TlsConnection, Wire

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
MAX_FIRST_BYTES = 64 << 10
MAX_FDS = 4
MAX_CONNECTIONS = 1024


def listen_unix(path: str) -> socket.socket:
    """A listening unix socket at `path`. Replaces the socket of an earlier process."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


def listen_tcp(host: str) -> socket.socket:
    """A listening TCP socket on a free port of a named interface."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    listener.bind(address)
    listener.listen(128)
    return listener


def tcp_address(listener: socket.socket) -> str:
    return join_address(*listener.getsockname()[:2])


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError if `address` is not host:port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def connect_unix(path: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(raw, path)
    except BaseException:
        raw.close()
        raise
    return raw


async def connect_tcp(address: str) -> socket.socket:
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    raw = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    try:
        await loop.sock_connect(raw, target)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        raw.close()
        raise
    return raw


def peer_is_same_user(raw: socket.socket) -> bool:
    return _peer_credentials(raw)[1] == os.getuid()


def peer_pid(raw: socket.socket) -> int:
    """Process id at the other end of a unix socket, from the kernel."""
    return _peer_credentials(raw)[0]


def _peer_credentials(raw: socket.socket) -> tuple[int, int]:
    """(process id, user id)."""
    pid, uid, _ = _CREDENTIALS.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


async def send_first(raw: Wire, framed: bytes, fds: list[int]) -> None:
    """Sends a framed message with descriptors, which the caller closes."""
    if isinstance(raw, TlsConnection):
        await raw.send(framed)
        return
    if not fds:
        await asyncio.get_running_loop().sock_sendall(raw, framed)
        return
    sent = socket.send_fds(raw, [framed], fds)  # does not block: a new socket's buffer is empty
    if sent < len(framed):
        await asyncio.get_running_loop().sock_sendall(raw, framed[sent:])


async def receive_first(raw: Wire, max_bytes: int = MAX_FIRST_BYTES) -> tuple[bytes, list[int]]:
    """The body of the first framed message, and its descriptors, which the caller closes.

    Raises:
        HandoffFault: (protocol) too long, truncated, or too many descriptors.
        OSError: the connection failed.
    """
    fds: list[int] = []
    try:
        head = await _receive_exactly(raw, _LENGTH.size, fds)
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise protocol_fault(f"expected a first message of at most {max_bytes} bytes, got {length}")
        return await _receive_exactly(raw, length, fds), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


async def _receive_exactly(raw: Wire, size: int, fds: list[int]) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        chunk = await _receive_once(raw, size - len(parts), fds)
        if not chunk:
            raise protocol_fault("the connection ended inside its first message")
        parts += chunk
    return bytes(parts)


async def _receive_once(raw: Wire, size: int, fds: list[int]) -> bytes:
    if isinstance(raw, TlsConnection):
        return await raw.receive(size)
    if raw.family != socket.AF_UNIX:
        return await asyncio.get_running_loop().sock_recv(raw, size)
    await readable(raw)
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    try:
        chunk, ancillary, flags, _ = raw.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return await _receive_once(raw, size, fds)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
            fds.extend(found)
    if flags & socket.MSG_CTRUNC or len(fds) > MAX_FDS:
        raise protocol_fault(f"expected at most {MAX_FDS} descriptors with a message")
    return chunk


async def readable(raw: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(raw, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(raw)


async def writable(raw: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(raw, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(raw)


async def serve(
    listener: socket.socket,
    handle: Callable[[socket.socket], Awaitable[None]],
    max_connections: int = MAX_CONNECTIONS,
) -> None:
    """Accepts forever, with one task per connection. Closes the listener when cancelled."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def run(raw: socket.socket) -> None:
        await handle(raw)

    with listener:
        while True:
            try:
                raw, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors, or the peer disconnected
                continue
            if len(tasks) >= max_connections:
                raw.close()
                continue
            task = loop.create_task(run(raw))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
