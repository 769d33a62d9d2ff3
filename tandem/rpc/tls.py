"""Mutual TLS inside the cluster, from PEM files that are reread when they change.

Both sides present a certificate signed by the one `ca`. Host names are not verified, because processes are found by
address. The certificate carries the peer's identity: see `tandem.rpc.identity`.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.errors import ConfigError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int] | None, ...]


class PemFiles(Protocol):
    """Paths of PEM files."""

    @property
    def cert(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def ca(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """A context for accepted connections and one for outgoing ones, and the PEM data they were made of, for gRPC.

    `peer` is the identity (a URI) that the other side's certificate must carry; None: any that `ca` signed.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes
    peer: str | None = None

    def check_peer(self, connection: ssl.SSLObject | ssl.SSLSocket) -> None:
        """Call it after the handshake. Raises ssl.SSLError if the other side has another identity."""
        if self.peer is not None and self.peer not in uris_of(connection.getpeercert() or {}):
            raise ssl.SSLError(f"expected a certificate of {self.peer}")


def uris_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """URIs of a certificate in the ssl module's form."""
    return frozenset(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def load_tls(files: PemFiles, field: str = "transfer.tls", *, peer: str | None = None) -> TlsContexts:
    """Raises ConfigError naming the file's field and the problem."""
    cert_pem, key_pem, ca_pem = (
        read_file(path, f"{field}.{name}")
        for name, path in (("cert", files.cert), ("key", files.key), ("ca", files.ca))
    )
    for name, path in (("ca", files.ca), ("cert", files.cert)):
        check_certificates(path, f"{field}.{name}")
    contexts = TlsContexts(
        _context(ssl.PROTOCOL_TLS_SERVER, files, field),
        _context(ssl.PROTOCOL_TLS_CLIENT, files, field),
        cert_pem,
        key_pem,
        ca_pem,
        peer,
    )
    _self_test(contexts, files, field)
    return contexts


class RenewedTls:
    """TLS contexts of files that may be renewed in place. Open connections keep their certificate; new ones use the
    new.

    Raises:
        ConfigError: at first, as `load_tls`. Later, files that do not match, as while only one of them is written,
            leave the previous contexts in use.
    """

    def __init__(self, files: PemFiles, field: str = "transfer.tls", *, peer: str | None = None) -> None:
        self._files = files
        self._field = field
        self._peer = peer
        self._stamp = self._look()
        self._contexts = load_tls(files, field, peer=peer)

    def current(self) -> TlsContexts:
        stamp = self._look()
        if stamp != self._stamp:
            try:
                renewed = load_tls(self._files, self._field, peer=self._peer)
                if self._look() != stamp:
                    return self._contexts  # the files are being written
                self._contexts = renewed
                log.info("loaded renewed certificates: %s", self._files.cert)
            except ConfigError as error:
                log.warning("kept the previous certificates: %s", error.message)
            self._stamp = stamp
        return self._contexts

    def _look(self) -> Stamp:
        return stamp_of(self._files.cert, self._files.key, self._files.ca)


def stamp_of(*paths: str) -> Stamp:
    """Changes after one of the files was written or replaced."""
    return tuple(map(_stamp, paths))


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_file(path: str, field: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise wrong_file(field, path, f"cannot be read: {error.strerror}") from None


def check_certificates(path: str, field: str) -> None:
    """Raises ConfigError if the file contains no certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise wrong_file(field, path, "expected certificates in PEM format") from None


def use_key_pair(context: ssl.SSLContext, cert: str, key: str, field: str) -> None:
    """Loads a certificate and its key. Raises ConfigError if they do not match."""
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # never prompts on a terminal
    except ssl.SSLError:
        raise wrong_file(f"{field}.key", key, f"expected the unencrypted PEM key of {cert}") from None


def wrong_file(field: str, path: str, what: str) -> ConfigError:
    return ConfigError(f"{field}: {path}: {what}", field=field)


def _context(protocol: ssl._SSLMethod, files: PemFiles, field: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cafile=files.ca)
    use_key_pair(context, files.cert, files.key, field)
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are never resumed
    return context


def _self_test(contexts: TlsContexts, files: PemFiles, field: str) -> None:
    """Performs a handshake in memory: our certificate must be valid for our peers, in both directions."""
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
            raise wrong_file(f"{field}.cert", files.cert, f"is not valid for {files.ca}: {why}") from None
