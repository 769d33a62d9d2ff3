"""What the gRPC edge relies on in grpc.aio and generated code beyond their documentation. If an upgrade breaks it, a
test here fails by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from router.edge.grpc import InferenceEdge
from router.edge.keyed_grpc import KeyedCalls
from router.edge.limits.grpc_calls import CallLimit
from router.edge.write_pauses import WritePauses
from router.service import RouterService
from tandem.v1 import inference_pb2
from tandem.v1.inference_pb2_grpc import add_InferenceServicer_to_server

METHOD = "/test.Service/Method"


class Recorder:
    """Takes the place of a server when generated code adds a servicer to it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def test_generated_code_registers_every_method_with_a_deserializer_bound_to_its_message() -> None:
    recorder = Recorder()
    server = cast(grpc.aio.Server, recorder)
    add_InferenceServicer_to_server(
        InferenceEdge(cast(RouterService, None), CallLimit(1), cast(KeyedCalls, None), WritePauses()), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(("x",)), server)
    generate = recorder.handlers["/tandem.v1.Inference/Generate"]
    assert generate.request_deserializer.__self__ is inference_pb2.GenerateRequest
    assert generate.unary_stream is not None
    assert recorder.handlers["/grpc.health.v1.Health/Check"].request_deserializer.__self__ is (
        health_pb2.HealthCheckRequest
    )
    assert recorder.handlers["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"].stream_stream is not None


async def call(handler: grpc.RpcMethodHandler[Any, Any], interceptors: Sequence[Any] = ()) -> list[bytes]:
    """What a client that sends one message to `handler` gets."""
    server = grpc.aio.server(interceptors=interceptors)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Method": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            running: Any = cast(Any, channel.unary_stream(METHOD))(b"a", metadata=(("key", "value"),))
            return [each async for each in running]
    finally:
        await server.stop(None)


async def test_a_coroutine_may_answer_a_stream_by_writing_to_its_context() -> None:
    async def method(data: bytes, context: Any) -> None:
        assert dict(context.invocation_metadata())["key"] == "value"
        assert context.peer().startswith("ipv4:127.0.0.1:")
        assert context.time_remaining() is None
        await context.write(data)
        await context.write(b"b")

    assert await call(grpc.unary_stream_rpc_method_handler(method)) == [b"a", b"b"]


class Replace(grpc.aio.ServerInterceptor):
    def __init__(self, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._handler = handler

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        assert handler.unary_stream is not None, "the interceptor gets the handler of the method"
        assert handler_call_details.method == METHOD
        assert ("key", "value") in handler_call_details.invocation_metadata
        return self._handler


async def test_an_interceptor_may_return_a_handler_of_another_kind_which_refuses_the_call() -> None:
    async def method(data: bytes, context: Any) -> None:
        pytest.fail("the refused method ran")

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
        return b""

    replaced = Replace(grpc.stream_unary_rpc_method_handler(refuse))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(grpc.unary_stream_rpc_method_handler(method), [replaced])
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_error_of_a_write_to_a_client_that_is_gone_has_a_name() -> None:
    assert issubclass(grpc.aio.InternalError, Exception)
