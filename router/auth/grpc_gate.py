"""Authentication on the gRPC edge: an interceptor before every method of the port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc

from router.auth.access import grpc_access
from router.auth.call import Call
from router.auth.call_gate import CallGate
from router.auth.principal import AccessLevel
from router.request_ids import client_request_id, trace_id_of
from tandem.errors import TandemError
from tandem.rpc.grpc_errors import abort

Metadata = tuple[tuple[str, str | bytes], ...] | None
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_OPEN = (AccessLevel.PUBLIC, AccessLevel.CONTROLLER)


class GrpcGate(grpc.aio.ServerInterceptor):
    """Handlers get the call with their context: see `call_of`."""

    def __init__(self, calls: CallGate) -> None:
        self._calls = calls

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if handler is None or grpc_access(method) in _OPEN:  # methods for the controller check its secret themselves
            return handler
        call = self._calls.begin(
            method,
            grpc_access(method),
            "",  # the context has it
            client_request_id(value_of(metadata, "x-request-id")),
            trace_id_of((value_of(metadata, "traceparent") or "").encode()),
        )
        try:
            await self._calls.authenticate(call, value_of(metadata, "authorization"))
        except TandemError as error:
            return self._refusal(call, error)
        return _with_call(handler, call)

    def _refusal(self, call: Call, error: TandemError) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A handler that takes a stream, whatever the method takes: it answers before it reads a request."""

        async def refuse(requests: object, context: Any) -> bytes:
            call.source = source_of(context)
            self._calls.finish(call)
            await abort(context, error)

        return grpc.stream_unary_rpc_method_handler(refuse)


class CallContext:
    """A gRPC context with its call. The library's own context takes no attributes."""

    def __init__(self, context: Any, call: Call) -> None:
        self.call = call
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _with_call(handler: Any, call: Call) -> Any:
    """A handler of the same kind whose method gets a CallContext. Methods are coroutines and take streams, as those of
    GuardedServer: grpc.aio would run any other function in a thread."""
    method = handler.stream_unary or handler.stream_stream

    async def with_call(requests: Any, context: Any) -> Any:
        call.source = source_of(context)
        return await method(requests, CallContext(context, call))

    kind = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.stream_unary_rpc_method_handler
    return kind(with_call, handler.request_deserializer, handler.response_serializer)


def call_of(context: Any) -> Call | None:
    """None if calls are not watched."""
    return context.call if isinstance(context, CallContext) else None


def value_of(metadata: Metadata, key: str) -> str | None:
    return next((value for name, value in metadata or () if name == key and isinstance(value, str)), None)


def header_of(context: Any) -> Callable[[str], str | None]:
    """Finds a value in the metadata of a call by its key."""
    return partial(value_of, context.invocation_metadata())


def source_of(context: Any) -> str:
    """The peer's address without its port, from `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind
