"""Around every method of the services that clients call: messages are decoded within limits, and the ids that a client
put into its metadata are echoed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from router.call_limit import CallLimit
from router.proto_limits import decoder
from router.request_ids import echoed
from tandem.errors import RequestCancelled, TandemError
from tandem.grpc_errors import abort

Decode = Callable[[bytes], Message]
Method = Callable[[Any, Any], Any]
_LAST_WORDS_S = 0.1


class GuardedServer:
    """Stands before `server` when generated code adds a servicer to it.

    Args: `max_calls` run at a time. The library's own count keeps the place of a call whose client reads nothing.
    """

    def __init__(self, server: grpc.aio.Server, max_calls: int, client_timeout_s: float) -> None:
        self._server = server
        self._calls = CallLimit(max_calls)
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
            call = self._unary(handler.unary_unary, decode)
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream is not None:
            call = self._unary_stream(handler.unary_stream, decode)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = self._stream_stream(handler.stream_stream, decode)
        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)

    def _unary(self, method: Method, decode: Decode) -> Method:
        async def call(data: bytes, context: Any) -> Any:
            async with self._begun(context):
                request = decode(data)
                return await method(request, context)

        return call

    def _unary_stream(self, method: Method, decode: Decode) -> Method:
        async def call(data: bytes, context: Any) -> None:
            async with self._begun(context):
                request = decode(data)
                responses = method(request, context)
                if inspect.isawaitable(responses):  # the library's health service writes by itself
                    await responses
                else:
                    await _write_all(responses, context, self._client_timeout_s)

        return call

    def _stream_stream(self, method: Method, decode: Decode) -> Method:
        async def call(arriving: AsyncIterator[bytes], context: Any) -> None:
            async with self._begun(context):
                requests = (decode(data) async for data in arriving)
                await _write_all(method(requests, context), context, self._client_timeout_s)

        return call

    @contextlib.asynccontextmanager
    async def _begun(self, context: Any) -> AsyncIterator[None]:
        await _echo(context)
        try:
            with self._calls:
                yield
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
        # The status waits behind what is unread, or the library refuses it as one operation too many (an exception of
        # its own). As cancelled, the call ends without it, and its place is free.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_WORDS_S):
                await abort(context, RequestCancelled(f"expected the answer to be read within {client_timeout_s:g} s"))
        raise
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
