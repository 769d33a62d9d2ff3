"""A gRPC client of the router, as small as the commands need it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2, inference_pb2_grpc


def chat_request(
    messages: list[inference_pb2.ChatMessage], *, model: str, temperature: float, max_tokens: int | None
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=model,
        chat=inference_pb2.ChatMessages(messages=messages),
        sampling=inference_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens),
    )


async def generate(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, api_key: str | None = None
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """The stream's events. Raises the TandemError that the router reports."""
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
    try:
        async for event in stub.Generate(request, metadata=metadata):
            yield event
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
