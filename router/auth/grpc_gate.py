"""The door of the gRPC edge: an interceptor before every method of the port, also those that no table lists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc

from router.auth.access import grpc_access
from router.auth.call import Call
from router.auth.calls import Calls
from router.auth.principal import Access
from router.request_ids import client_request_id, trace_id_of
from tandem.errors import TandemError
from tandem.rpc.grpc_errors import abort

Metadata = tuple[tuple[str, str | bytes], ...] | None
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_OPEN = (Access.PUBLIC, Access.CONTROLLER)


class GrpcGate(grpc.aio.ServerInterceptor):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if handler is None or grpc_access(method) in _OPEN:  # the controller shows its own secret
            return handler
        call = begin(self._calls, method, metadata, "")
        try:
            await self._calls.let_in(call, value_of(metadata, "authorization"))
        except TandemError as error:
            return self._refusal(call, error)
        return handler

    def _refusal(self, call: Call, error: TandemError) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Of whatever kind the method is: as one that takes a stream, it is answered before a request is read."""

        async def refuse(requests: object, context: Any) -> bytes:
            call.source = source_of(context)
            self._calls.over(call)
            await abort(context, error)

        return grpc.stream_unary_rpc_method_handler(refuse)


class CallContext:
    """A gRPC context with its call, as handlers get it: the library's own takes no attributes."""

    def __init__(self, context: Any, call: Call) -> None:
        self.call = call
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def call_of(context: Any) -> Call | None:
    return context.call if isinstance(context, CallContext) else None


def begin(calls: Calls, method: str, metadata: Metadata, source: str) -> Call:
    return calls.begin(
        method,
        grpc_access(method),
        source,
        client_request_id(value_of(metadata, "x-request-id")),
        trace_id_of((value_of(metadata, "traceparent") or "").encode()),
    )


def value_of(metadata: Metadata, key: str) -> str | None:
    return next((value for name, value in metadata or () if name == key and isinstance(value, str)), None)


def source_of(context: Any) -> str:
    """The peer's address, without its port: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind
