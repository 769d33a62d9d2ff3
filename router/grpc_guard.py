"""Around every method of the services that clients call: messages are decoded within limits, and the ids that a client
put into its metadata are echoed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from router.proto_limits import decoder
from router.request_ids import echoed
from tandem.errors import RequestCancelled, TandemError
from tandem.grpc_errors import abort

Decode = Callable[[bytes], Message]
Method = Callable[[Any, Any], Any]


class GuardedServer:
    """Stands before `server` when generated code adds a servicer to it."""

    def __init__(self, server: grpc.aio.Server, client_timeout_s: float) -> None:
        self._server = server
        self._client_timeout_s = client_timeout_s

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """The same methods come by the other call."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guarded(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def _guarded(self, handler: Any) -> Any:
        """The handler of a method, with one that takes bytes in place of messages."""
        decode = decoder(handler.request_deserializer.__self__)
        serializer = handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, decode), response_serializer=serializer
            )
        if handler.unary_stream is not None:
            call = _unary_stream(handler.unary_stream, decode, self._client_timeout_s)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = _stream_stream(handler.stream_stream, decode, self._client_timeout_s)
        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)


def _unary(method: Method, decode: Decode) -> Method:
    async def call(data: bytes, context: Any) -> Any:
        await _echo(context)
        return await method(await _decoded(data, context, decode), context)

    return call


def _unary_stream(method: Method, decode: Decode, client_timeout_s: float) -> Method:
    async def call(data: bytes, context: Any) -> None:
        await _echo(context)
        await _write_all(method(await _decoded(data, context, decode), context), context, client_timeout_s)

    return call


def _stream_stream(method: Method, decode: Decode, client_timeout_s: float) -> Method:
    async def call(arriving: AsyncIterator[bytes], context: Any) -> None:
        async def requests() -> AsyncIterator[Message]:
            async for data in arriving:
                yield await _decoded(data, context, decode)

        await _echo(context)
        await _write_all(method(requests(), context), context, client_timeout_s)

    return call


async def _decoded(data: bytes, context: Any, decode: Decode) -> Message:
    try:
        return decode(data)
    except TandemError as error:
        await abort(context, error)


async def _echo(context: Any) -> None:
    given = context.invocation_metadata() or ()
    if shown := echoed((name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in given):
        await context.send_initial_metadata(tuple((name.decode(), value.decode()) for name, value in shown))


async def _write_all(responses: AsyncGenerator[Any, None], context: Any, client_timeout_s: float) -> None:
    """A client that leaves them unread is cut off: until then a write does not return."""
    patience = _Patience(client_timeout_s)
    try:
        async with contextlib.aclosing(responses):
            async for response in responses:
                patience.writes += 1
                await context.write(response)
                patience.writes += 1
    except asyncio.CancelledError:
        if not patience.ended:
            raise
        await abort(context, RequestCancelled(f"expected the answer to be read within {client_timeout_s:g} s"))
    finally:
        patience.close()


class _Patience:
    """Cancels the current task where one wait of it takes longer than `limit_s`, or twice that."""

    def __init__(self, limit_s: float) -> None:
        self.writes = 0  # begun and ended: odd while one is on its way
        self.ended = False
        self._limit_s = limit_s
        self._seen: int | None = None
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._check)

    def _check(self) -> None:
        # The same write as the last time has been waiting for at least the limit.
        if self.writes % 2 and self._seen == self.writes and self._task is not None:
            self.ended = True
            self._task.cancel()
            return
        self._seen = self.writes
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def close(self) -> None:
        self._timer.cancel()
