"""A load client for Tandem's gRPC API. It sends token ids; the last event has the router's timeline."""

from __future__ import annotations

import grpc

from cluster.cli.load.client import LoadRequest, LoadResponse, OnTokens
from cluster.cli.router_client import edge_channel
from router.request_terms import PRIORITY
from tandem.errors import InternalError, ModelNotFound
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2, inference_pb2_grpc


class GrpcClient:
    def __init__(
        self, address: str, ca: str | None, *, tls: bool, model: str, api_key: str | None, ignore_eos: bool
    ) -> None:
        """Needs a running event loop. Raises ConfigError if `ca` cannot be read."""
        self._channel = _channel(address, ca, tls)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._model, self._ignore_eos = model, ignore_eos
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def vocab_tokens(self) -> int:
        """The vocabulary size of the requested model. Raises ModelNotFound, or the router's error."""
        try:
            response = await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        bases = [card for card in response.models if not card.parent]
        for card in response.models:
            if card.name == self._model or (not self._model and bases == [card]):
                return card.vocab_tokens
        names = ", ".join(card.name for card in response.models)
        raise ModelNotFound(f"--model: expected one of {names}, got {self._model!r}", field="--model")

    async def send(self, request: LoadRequest, on_tokens: OnTokens) -> LoadResponse:
        message = inference_pb2.GenerateRequest(
            model=self._model,
            sampling=inference_pb2.SamplingParams(
                temperature=0, max_tokens=request.output_tokens, ignore_eos=self._ignore_eos
            ),
        )
        if isinstance(request.prompt, str):
            message.prompt = request.prompt
        else:
            message.token_ids.ids.extend(request.prompt)
        metadata = (*self._metadata, (PRIORITY, request.priority)) if request.priority else self._metadata
        try:
            async for event in self._stub.Generate(message, metadata=metadata):
                if event.HasField("chunk") and event.chunk.token_ids:
                    on_tokens(len(event.chunk.token_ids))
                elif event.HasField("finished"):
                    return _response(event.finished)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        raise InternalError("expected the stream to end with `finished`, and it ended without")

    async def close(self) -> None:
        await self._channel.close()


def _response(finished: inference_pb2.Finished) -> LoadResponse:
    timeline = finished.timeline
    return LoadResponse(
        output_tokens=finished.usage.completion_tokens,
        prompt_tokens=finished.usage.prompt_tokens,
        cached_tokens=finished.usage.cached_tokens,
        queue_s=timeline.queue_s,
        handed_off=bool(timeline.prefill_worker),
        kv_bytes_moved=timeline.kv_bytes_moved,
    )


def _channel(address: str, ca: str | None, tls: bool) -> grpc.aio.Channel:
    if tls and ca is None:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials())
    return edge_channel(address, ca)
