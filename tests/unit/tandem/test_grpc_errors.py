from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.errors import WIRE, ErrorCode, InputError, OverloadedError, TandemError, error_from_code
from tandem.rpc.grpc_errors import abort, error_from_rpc, retry_after_s, status_proto

METHOD = "/test.Service/Fail"


def echo(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary(METHOD)


@pytest.fixture
async def fail_with() -> AsyncIterator[Any]:
    """Calls a server that ends with the given error and returns the typed error the client makes of it."""
    chosen: list[TandemError] = []

    async def handler(request: bytes, context: Any) -> bytes:
        await abort(context, chosen[0])

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Fail": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def call(error: TandemError) -> TandemError:
            chosen[:] = [error]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo(channel)(b"")
            assert caught.value.code() is grpc.StatusCode[error.wire.grpc_status]
            return error_from_rpc(caught.value)

        yield call
    await server.stop(None)


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_every_error_crosses_grpc_with_its_type(code: ErrorCode, fail_with: Any) -> None:
    sent = error_from_code(code.value, "what happened", "where")
    came = await fail_with(sent)
    assert type(came) is type(sent)
    assert (came.message, came.field) == ("what happened", "where")
    assert (came.retry_after_s is not None) == WIRE[code].retryable


async def test_retry_delay_crosses_grpc(fail_with: Any) -> None:
    came = await fail_with(OverloadedError("full", retry_after_s=2.5))
    assert came.retry_after_s == 2.5


def test_only_retryable_errors_carry_a_delay() -> None:
    assert retry_after_s(InputError("no")) is None
    assert retry_after_s(OverloadedError("full")) == 1.0
    assert len(status_proto(InputError("no")).details) == 1
    assert len(status_proto(OverloadedError("full")).details) == 2


async def test_status_of_a_foreign_server_becomes_unavailable_or_its_kind() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(channel)(b"")
    assert error_from_rpc(caught.value).code is ErrorCode.UNAVAILABLE
