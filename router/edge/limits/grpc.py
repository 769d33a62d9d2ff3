"""Limits of the gRPC edge, around every method: concurrent calls, the time for a message and what it may hold, and how
long a client may leave an answer unread. It also echoes the client's ids, and reports the end of a call for the audit
log."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from router.auth.call_gate import CallGate
from router.auth.grpc_gate import call_of
from router.edge.limits.grpc_arrivals import Arrivals, caller_of, messages
from router.edge.limits.grpc_calls import CallLimit
from router.edge.limits.proto import decoder
from router.request_ids import echoed, name_call
from tandem.errors import ErrorCode, RequestCancelled, TandemError
from tandem.rpc.grpc_errors import abort

Decode = Callable[[bytes], Message]
Method = Callable[[Any, Any], Any]
Admit = Callable[[Any], None]
MAX_IDLE_S = 600.0  # between two messages of a stream
_STATUS_TIMEOUT_S = 0.1


class GuardedServer:
    """Generated code adds a servicer to it in place of `server`; it wraps the methods and passes them on.

    Every method reads its messages itself, so the guard begins with the headers of a call.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        max_calls: int,
        client_timeout_s: float,
        calls: CallGate | None = None,
        *,
        max_of_one: int | None = None,
        arrivals: Arrivals | None = None,
        streams: CallLimit | None = None,
        answers: CallLimit | None = None,
        admit: Admit | None = None,
    ) -> None:
        """At most `max_calls` run at a time, and `max_of_one` of one key or address. `streams`, `answers`: replace
        that limit for methods that take, and that answer with, several messages, as a client may keep such a call for
        ever. `calls`: gets the end of each call that GrpcGate began. `admit`: gets the context of each call before its
        message; it may raise TandemError."""
        self._server = server
        self._limit = CallLimit(max_calls, max_of_one)
        self._streams = streams or self._limit
        self._answers = answers or self._limit
        self._calls = calls
        self._arrivals = arrivals or Arrivals(max_calls, client_timeout_s)
        self._admit = admit
        self._client_timeout_s = client_timeout_s

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignored: the same methods come through `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guarded(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def _guarded(self, handler: Any) -> Any:
        """The handler of a method, with one that takes a stream of bytes in place of messages."""
        decode = decoder(handler.request_deserializer.__self__)
        serializer = handler.response_serializer
        if handler.unary_unary is not None:
            call = self._unary(handler.unary_unary, decode)
            return grpc.stream_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream is not None:
            call = self._unary_stream(handler.unary_stream, decode)
        else:
            call = self._stream_stream(handler.stream_stream, decode)
        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)

    def _unary(self, method: Method, decode: Decode) -> Method:
        async def call(_: object, context: Any) -> Any:
            async with self._checked(context):
                data = await self._arrivals.message(context)
                with self._limit.of(caller_of(context)):
                    return await method(decode(data), context)

        return call

    def _unary_stream(self, method: Method, decode: Decode) -> Method:
        async def call(_: object, context: Any) -> None:
            async with self._checked(context):
                data = await self._arrivals.message(context)
                with self._answers.of(caller_of(context)):
                    responses = method(decode(data), context)
                    if inspect.isawaitable(responses):  # the library's health service writes its answers itself
                        await responses
                    else:
                        await _write_all(responses, context, self._client_timeout_s)

        return call

    def _stream_stream(self, method: Method, decode: Decode) -> Method:
        async def call(_: object, context: Any) -> None:
            async with self._checked(context):
                with self._streams.of(caller_of(context)):
                    requests = (decode(data) async for data in messages(context, MAX_IDLE_S))
                    await _write_all(method(requests, context), context, self._client_timeout_s)

        return call

    @contextlib.asynccontextmanager
    async def _checked(self, context: Any) -> AsyncIterator[None]:
        await _echo(context)
        try:
            if self._admit is not None:
                self._admit(context)
            with self._reported(context):
                yield
        except TandemError as error:
            await abort(context, error)

    @contextlib.contextmanager
    def _reported(self, context: Any) -> Iterator[None]:
        call = call_of(context)
        if call is None or self._calls is None:
            yield
            return
        try:
            yield
        except TandemError as error:
            call.code = error.code
            raise
        except asyncio.CancelledError:
            call.code = call.code or ErrorCode.CANCELLED
            raise
        finally:
            if not call.is_detached:
                self._calls.finish(call)


async def _echo(context: Any) -> None:
    given = context.invocation_metadata() or ()
    shown = echoed((name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in given)
    name_call(shown)
    if shown:
        await context.send_initial_metadata(tuple((name.decode(), value.decode()) for name, value in shown))


async def _write_all(responses: AsyncGenerator[Any, None], context: Any, client_timeout_s: float) -> None:
    """Cancels the call if the client leaves the responses unread: until it reads, a write does not return."""
    watchdog = _WriteWatchdog(client_timeout_s)
    write = context.write
    try:
        async with contextlib.aclosing(responses):
            async for response in responses:
                watchdog.writes += 1
                await write(response)
                watchdog.writes += 1
    except grpc.aio.InternalError as error:  # the library raises it if the client is gone, before it cancels the call
        raise asyncio.CancelledError from error
    except asyncio.CancelledError:
        if not watchdog.expired:
            raise
        # The status waits behind the unread responses, or the library refuses it as one operation too many, with an
        # exception of its own. Cancellation ends the call without a status and frees its place.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                await abort(context, RequestCancelled(f"expected the answer to be read within {client_timeout_s:g} s"))
        raise
    finally:
        watchdog.close()


class _WriteWatchdog:
    """Cancels the current task if one write takes longer than `limit_s`; it notices after at most twice that."""

    def __init__(self, limit_s: float) -> None:
        self.writes = 0  # counts each begin and each end of a write: odd while one is in progress
        self.expired = False
        self._limit_s = limit_s
        self._seen: int | None = None
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._check)

    def _check(self) -> None:
        # The same write as at the last check has taken at least the limit.
        if self.writes % 2 and self._seen == self.writes and self._task is not None:
            self.expired = True
            self._task.cancel()
            return
        self._seen = self.writes
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def close(self) -> None:
        self._timer.cancel()
