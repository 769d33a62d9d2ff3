"""gRPC inside the cluster, with mutual TLS if `security.tls` is set. Only this module opens channels, adds ports and
authenticates callers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
import grpc.aio

from tandem.config.security import TlsSpec
from tandem.rpc.identity import Identity, identities
from tandem.rpc.tls import RenewedTls, TlsContexts

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]
Allowed = Mapping[str, frozenset[Identity]]
"""Full method name, /package.Service/Method, to the identities that may call it. Other methods refuse all callers."""

OnRefused = Callable[[str, Any], None]
"""Gets the method and the context of a call that its caller's certificate does not allow."""

FIELD = "security.tls"
CLOSE_GRACE_S = 2.0  # for calls in flight


class ClusterTls:
    """The TLS identity of one process in its cluster. New connections use renewed files.

    Raises:
        ConfigError: a file cannot be used; names its field.
    """

    def __init__(self, cluster: str, own: Identity, files: TlsSpec) -> None:
        self.cluster = cluster
        self._renewed = RenewedTls(files.of(own), FIELD)

    @classmethod
    def maybe(cls, cluster: str, own: Identity, files: TlsSpec | None) -> ClusterTls | None:
        return None if files is None else cls(cluster, own, files)

    def current(self) -> TlsContexts:
        """Returns a different object after the files were renewed. A channel keeps the certificate it was opened
        with."""
        return self._renewed.current()

    def client_credentials(self) -> grpc.ChannelCredentials:
        now = self._renewed.current()
        return grpc.ssl_channel_credentials(now.ca_pem, now.key_pem, now.cert_pem)

    def server_credentials(self) -> grpc.ServerCredentials:
        served = self._renewed.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            if (now := self._renewed.current()) is served:
                return None
            served = now
            return _configuration(now)

        return dynamic_credentials(_configuration(served), renewed, needs_client=True)


def dynamic_credentials(
    first: grpc.ServerCertificateConfiguration,
    renewed: Callable[[], grpc.ServerCertificateConfiguration | None],
    *,
    needs_client: bool,
) -> grpc.ServerCredentials:
    """gRPC calls `renewed` on its own thread before every handshake; None keeps the previous certificates."""
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)  # the stub does not allow None
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=needs_client)


def _configuration(now: TlsContexts) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key_pem, now.cert_pem)], now.ca_pem)


def open_channel(address: str, tls: ClusterTls | None, peer: Identity, options: Options = ()) -> grpc.aio.Channel:
    """Opens a channel to a process of the cluster, which must prove the identity `peer`."""
    if tls is None or address.startswith("unix:"):  # a socket in a folder that only this user can access
        return grpc.aio.insecure_channel(address, options=options)
    name = ("grpc.ssl_target_name_override", peer.dns_name(tls.cluster))
    return grpc.aio.secure_channel(address, tls.client_credentials(), options=(*options, name))


def make_server(
    tls: ClusterTls | None, allowed: Allowed, options: Options, on_refused: OnRefused = lambda method, context: None
) -> grpc.aio.Server:
    """A server that checks callers' identities. Without TLS callers have no identity, so all are accepted."""
    interceptors = () if tls is None else (CallerCheck(tls.cluster, allowed, on_refused),)
    return grpc.aio.server(interceptors=interceptors, options=options)


def add_port(server: grpc.aio.Server, address: str, tls: ClusterTls | None) -> int:
    """Returns the port. Raises RuntimeError if it is not available."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


class ChannelCache:
    """Channels to processes of one identity, by name. Opens a new channel after the address or the files changed."""

    def __init__(self, tls: ClusterTls | None, peer: Identity) -> None:
        self._tls = tls
        self._peer = peer
        self._open: dict[str, tuple[str, TlsContexts | None, grpc.aio.Channel]] = {}

    async def get(self, name: str, address: str) -> grpc.aio.Channel:
        now = None if self._tls is None else self._tls.current()
        known = self._open.get(name)
        if known is not None and known[0] == address and known[1] is now:
            return known[2]
        channel = open_channel(address, self._tls, self._peer)
        self._open[name] = address, now, channel
        if known is not None:
            await known[2].close(grace=CLOSE_GRACE_S)
        return channel

    async def forget(self, name: str) -> None:
        if (known := self._open.pop(name, None)) is not None:
            await known[2].close()

    async def close(self) -> None:
        for _, _, channel in self._open.values():
            await channel.close()


class CallerCheck(grpc.aio.ServerInterceptor):
    """Refuses callers whose certificate is of this cluster but whose role may not call the method."""

    def __init__(self, cluster: str, allowed: Allowed, on_refused: OnRefused) -> None:
        self._cluster = cluster
        self._allowed = allowed
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        return handler and self._checked(handler, method, self._allowed.get(method, frozenset()))

    def _checked(self, handler: Any, method: str, allowed: frozenset[Identity]) -> Any:
        async def check(context: Any) -> None:
            shown = self._identities(context)
            if shown.isdisjoint(allowed):
                wanted = " or ".join(sorted(allowed)) or "no role"
                log.warning(
                    "refused %s: the caller's certificate is of %s",
                    method,
                    ", ".join(sorted(shown)) or "no role in this cluster",
                )
                self._on_refused(method, context)
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{method}: expected a certificate of {wanted} in cluster {self._cluster}",
                )

        async def answer(request: Any, context: Any) -> Any:
            await check(context)
            return await (handler.unary_unary or handler.stream_unary)(request, context)

        async def stream(request: Any, context: Any) -> None:
            await check(context)
            answers = (handler.unary_stream or handler.stream_stream)(request, context)
            if inspect.isawaitable(answers):  # the method writes its responses itself
                await answers
                return
            async with aclosing(answers) as responses:
                async for response in responses:
                    await context.write(response)

        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrapped: Any = stream if handler.response_streaming else answer
        return kind(wrapped, handler.request_deserializer, handler.response_serializer)

    def _identities(self, context: Any) -> frozenset[Identity]:
        shown = context.auth_context() or {}
        return identities((name.decode("utf-8", "replace") for name in shown.get("peer_uri", ())), self._cluster)
