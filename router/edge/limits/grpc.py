"""Around every method of the services that clients call: messages are decoded within limits, the ids that a client put
into its metadata are echoed, and what it used is counted."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from router.auth import grpc_gate
from router.auth.calls import Calls
from router.edge.limits.calls import CallLimit
from router.edge.limits.proto import decoder
from router.request_ids import echoed, name_call
from tandem.errors import ErrorCode, RequestCancelled, TandemError
from tandem.rpc.grpc_errors import abort

Decode = Callable[[bytes], Message]
Method = Callable[[Any, Any], Any]
_LAST_WORDS_S = 0.1


class GuardedServer:
    """Stands before `server` when generated code adds a servicer to it.

    Args: `max_calls` run at a time. The library's own count keeps the place of a call whose client reads nothing.
    """

    def __init__(
        self, server: grpc.aio.Server, max_calls: int, client_timeout_s: float, calls: Calls | None = None
    ) -> None:
        """`calls`: who is told of each; None: nobody."""
        self._server = server
        self._limit = CallLimit(max_calls)
        self._calls = calls
        self._client_timeout_s = client_timeout_s

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """The same methods come by the other call."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guarded(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def _guarded(self, name: str, handler: Any) -> Any:
        """The handler of a method, with one that takes bytes in place of messages."""
        decode = decoder(handler.request_deserializer.__self__)
        serializer = handler.response_serializer
        if handler.unary_unary is not None:
            call = self._unary(name, handler.unary_unary, decode)
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream is not None:
            call = self._unary_stream(name, handler.unary_stream, decode)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = self._stream_stream(name, handler.stream_stream, decode)
        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)

    def _unary(self, name: str, method: Method, decode: Decode) -> Method:
        async def call(data: bytes, context: Any) -> Any:
            async with self._begun(name, context) as known:
                return await method(decode(data), known)

        return call

    def _unary_stream(self, name: str, method: Method, decode: Decode) -> Method:
        async def call(data: bytes, context: Any) -> None:
            async with self._begun(name, context) as known:
                responses = method(decode(data), known)
                if inspect.isawaitable(responses):  # the library's health service writes by itself
                    await responses
                else:
                    await _write_all(responses, context, self._client_timeout_s)

        return call

    def _stream_stream(self, name: str, method: Method, decode: Decode) -> Method:
        async def call(arriving: AsyncIterator[bytes], context: Any) -> None:
            async with self._begun(name, context) as known:
                requests = (decode(data) async for data in arriving)
                await _write_all(method(requests, known), context, self._client_timeout_s)

        return call

    @contextlib.asynccontextmanager
    async def _begun(self, name: str, context: Any) -> AsyncIterator[Any]:
        """The context for the method; it knows the call where somebody wants to."""
        await _echo(context)
        try:
            with self._limit, self._call(name, context) as known:
                yield known
        except TandemError as error:
            await abort(context, error)

    @contextlib.contextmanager
    def _call(self, name: str, context: Any) -> Iterator[Any]:
        if self._calls is None or not self._calls.is_watching:
            yield context
            return
        metadata = context.invocation_metadata()
        call = grpc_gate.begin(self._calls, name, metadata, grpc_gate.source_of(context))
        try:
            self._calls.identify(call, grpc_gate.value_of(metadata, "authorization"))
            yield grpc_gate.CallContext(context, call)
        except TandemError as error:
            call.code = error.code
            raise
        except asyncio.CancelledError:
            call.code = call.code or ErrorCode.CANCELLED
            raise
        finally:
            self._calls.over(call)


async def _echo(context: Any) -> None:
    given = context.invocation_metadata() or ()
    shown = echoed((name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in given)
    name_call(shown)
    if shown:
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
    except grpc.aio.InternalError as error:  # how the library says that the client is gone, before it cancels the call
        raise asyncio.CancelledError from error
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
