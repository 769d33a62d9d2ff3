"""TLS at the edge: one certificate for HTTP and gRPC, reloaded when its files change."""

from __future__ import annotations

import asyncio
import logging

import grpc

from tandem.config.security import EdgeTlsSpec
from tandem.errors import ConfigError
from tandem.rpc.edge_tls import FIELD, edge_context, fill_context
from tandem.rpc.grpc_tls import dynamic_credentials
from tandem.rpc.tls import Stamp, read_file, stamp_of

log = logging.getLogger(__name__)

POLL_S = 1.0
HANDSHAKE_TIMEOUT_S = 10.0


class EdgeTls:
    """Raises ConfigError naming the field of a file that cannot be used. After the start, files that do not fit each
    other leave the certificates in use."""

    def __init__(self, spec: EdgeTlsSpec) -> None:
        self._spec = spec
        self._stamp = self._current_stamp()
        self.http_context = edge_context(spec)
        self._grpc = self._configuration()

    def refresh(self) -> None:
        """Uses changed files for new connections. Open connections are not affected."""
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        try:
            edge_context(self._spec)  # a trial: a failure half way would spoil the context in use
            renewed = self._configuration()
            if self._current_stamp() != stamp:
                return  # the files are being written
            fill_context(self.http_context, self._spec)
            self._grpc = renewed
            log.info("loaded renewed certificates: %s", self._spec.cert)
        except ConfigError as error:
            log.warning("kept the previous certificates: %s", error.message)
        self._stamp = stamp

    async def refresh_forever(self, poll_s: float = POLL_S) -> None:
        while True:
            await asyncio.sleep(poll_s)
            try:
                self.refresh()
            except Exception:  # nor may a bug end the watch
                log.exception("kept the previous certificates")

    def server_credentials(self) -> grpc.ServerCredentials:
        given = self._grpc

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if self._grpc is given:
                return None
            given = self._grpc
            return given

        needs_client = self._spec.client_ca is not None
        return dynamic_credentials(given, renewed, needs_client=needs_client)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        spec = self._spec
        pair = read_file(spec.key, f"{FIELD}.key"), read_file(spec.cert, f"{FIELD}.cert")
        clients = None if spec.client_ca is None else read_file(spec.client_ca, f"{FIELD}.client_ca")
        return grpc.ssl_server_certificate_configuration([pair], clients)

    def _current_stamp(self) -> Stamp:
        return stamp_of(self._spec.cert, self._spec.key, *filter(None, [self._spec.client_ca]))
