"""Mutual TLS 1.3 for the TCP connections of the KV plane.

Both sides show a certificate that the one `ca` signed; host names are not compared, since workers are found by address:
so the `ca` should be one of this cluster's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.control import TlsFiles
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """One for connections we accept, one for those we make."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(files: TlsFiles, field: str = "transfer.tls") -> TlsContexts:
    """Raises ConfigError naming the file's field and what is wrong with it."""
    for name, path in (("cert", files.cert), ("key", files.key), ("ca", files.ca)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise _wrong(f"{field}.{name}", path, f"cannot be read: {error.strerror}") from None
    for name, path in (("ca", files.ca), ("cert", files.cert)):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
        except ssl.SSLError:
            raise _wrong(f"{field}.{name}", path, "expected certificates in PEM format") from None
    contexts = TlsContexts(
        _context(ssl.PROTOCOL_TLS_SERVER, files, field), _context(ssl.PROTOCOL_TLS_CLIENT, files, field)
    )
    _meet_ourselves(contexts, files, field)
    return contexts


class RenewedTls:
    """The contexts of files that are renewed where they lie. Connections that stand are not touched; the next one shows
    the new certificate.

    Raises:
        ConfigError: as `load_tls`, at first. Later, files that do not fit each other (one is written before the other)
            leave what there was.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._look()
        self._contexts = load_tls(files)

    def current(self) -> TlsContexts:
        stamp = self._look()
        if stamp != self._stamp:
            try:
                self._contexts = load_tls(self._files)
                log.info("new certificates: %s", self._files.cert)
            except ConfigError as error:
                log.warning("the certificates that were there stay in use: %s", error.message)
            self._stamp = stamp
        return self._contexts

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(map(_stamp, (self._files.cert, self._files.key, self._files.ca)))


def _stamp(path: str) -> tuple[int, int] | None:
    """Differs once a file was written or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _context(protocol: ssl._SSLMethod, files: TlsFiles, field: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cafile=files.ca)
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # never asks a terminal
    except ssl.SSLError:
        raise _wrong(f"{field}.key", files.key, f"expected the unencrypted PEM key of {files.cert}") from None
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are never resumed
    return context


def _meet_ourselves(contexts: TlsContexts, files: TlsFiles, field: str) -> None:
    """A handshake in memory: our certificate must pass for our own peers, both ways."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(down, up)
    server = contexts.server.wrap_bio(up, down, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason or str(error)
            raise _wrong(f"{field}.cert", files.cert, f"does not pass against {files.ca}: {why}") from None


def _wrong(field: str, path: str, what: str) -> ConfigError:
    return ConfigError(f"{field}: {path}: {what}", field=field)


class TlsConnection:
    """A connection after its TLS handshake and before its frames. Stands where a plain socket would."""

    family = socket.AF_INET

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, raw: socket.socket, contexts: TlsContexts) -> TlsConnection:
        """Takes the socket over. Raises OSError (ssl.SSLError among them)."""
        opening = asyncio.open_connection(
            sock=raw, ssl=contexts.client, server_hostname="", ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        return cls(*await opening)

    @classmethod
    async def accept(cls, raw: socket.socket, contexts: TlsContexts) -> TlsConnection:
        """Takes the socket over. Raises OSError (ssl.SSLError among them): it was not TLS, or not from our peers."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, raw, ssl=contexts.server, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, size: int) -> bytes:
        return await self.reader.read(size)

    def close(self) -> None:
        self.writer.close()


Wire = socket.socket | TlsConnection
"""A connection before its frames begin."""
