"""Tandem's own gRPC: token ids in, and at the end the router's account of where the time went."""

from __future__ import annotations

import grpc

from cluster.cli.load.client import Answer, Ask, Heard
from cluster.cli.router_client import edge_channel
from router.terms import PRIORITY
from tandem.errors import InternalError, ModelNotFound
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2, inference_pb2_grpc


class GrpcClient:
    def __init__(
        self, address: str, ca: str | None, *, tls: bool, model: str, api_key: str | None, ignore_eos: bool
    ) -> None:
        """Needs a running event loop. Raises ConfigError when `ca` cannot be read."""
        self._channel = _channel(address, ca, tls)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._model, self._ignore_eos = model, ignore_eos
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def vocab_tokens(self) -> int:
        """Of the model that is asked. Raises ModelNotFound, or what the router says."""
        try:
            answer = await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        for card in answer.models:
            if card.name == self._model or (not self._model and len(answer.models) == 1):
                return card.vocab_tokens
        names = ", ".join(card.name for card in answer.models)
        raise ModelNotFound(f"--model: expected one of {names}, got {self._model!r}", field="--model")

    async def send(self, ask: Ask, heard: Heard) -> Answer:
        request = inference_pb2.GenerateRequest(
            model=self._model,
            sampling=inference_pb2.SamplingParams(
                temperature=0, max_tokens=ask.output_tokens, ignore_eos=self._ignore_eos
            ),
        )
        if isinstance(ask.prompt, str):
            request.prompt = ask.prompt
        else:
            request.token_ids.ids.extend(ask.prompt)
        metadata = (*self._metadata, (PRIORITY, ask.priority)) if ask.priority else self._metadata
        try:
            async for event in self._stub.Generate(request, metadata=metadata):
                if event.HasField("chunk") and event.chunk.token_ids:
                    heard(len(event.chunk.token_ids))
                elif event.HasField("finished"):
                    return _answer(event.finished)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        raise InternalError("the stream ended without `finished`")

    async def close(self) -> None:
        await self._channel.close()


def _answer(finished: inference_pb2.Finished) -> Answer:
    line = finished.timeline
    return Answer(
        output_tokens=finished.usage.completion_tokens,
        prompt_tokens=finished.usage.prompt_tokens,
        cached_tokens=finished.usage.cached_tokens,
        queue_s=line.queue_s,
        handed_off=bool(line.prefill_worker),
        kv_bytes_moved=line.kv_bytes_moved,
    )


def _channel(address: str, ca: str | None, tls: bool) -> grpc.aio.Channel:
    if tls and ca is None:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials())
    return edge_channel(address, ca)
