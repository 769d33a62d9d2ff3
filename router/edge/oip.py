"""The Open Inference Protocol (version 2) on the router's gRPC port, for clients that are not specific to LLMs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

from router.auth.call import Call
from router.auth.grpc_gate import call_of, header_of
from router.edge.keyed_grpc import KeyedCalls, has_key
from router.edge.limits.grpc_arrivals import caller_of
from router.edge.limits.grpc_calls import CallLimit
from router.edge.oip_tensors import INPUTS, OUTPUTS, VERSION, InferRequest, model_config, parse_infer, response
from router.edge.openai.answer_format import text_of, tokens_of
from router.idempotency.keyed_answers import HEADER
from router.request_ids import new_request_id
from router.request_terms import RequestTerms
from router.requests.output import TextPiece
from router.service import RouterService
from tandem.errors import InputError, NotFound, PermissionDenied, TandemError, Unauthenticated
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceServicer
from tandem.version import tandem_version

SERVICE = "inference.GRPCInferenceService"
PLATFORM = "tandem"

StatisticsOf = Callable[[str], oip.ModelStatistics]  # of a model, without its name and version


class OipEdge(GRPCInferenceServiceServicer):
    """GuardedServer answers the client with the errors that the methods raise."""

    def __init__(self, service: RouterService, limit: CallLimit, keyed: KeyedCalls, statistics: StatisticsOf) -> None:
        self._service = service
        self._limit = limit
        self._keyed = keyed
        self._statistics = statistics

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Any) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._service.ready)

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Any) -> oip.ModelReadyResponse:
        known = request.name in self._service.models.usable_by(call_of(context)) and request.version in ("", VERSION)
        return oip.ModelReadyResponse(ready=known and self._service.models.is_ready(request.name))

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(
            name="tandem",
            version=tandem_version(),
            extensions=["model_stream_infer", "model_configuration", "statistics"],
        )

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        model = self._service.models.find(request.name, call_of(context))
        _check_version(request.version)
        return oip.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[_metadata(*each) for each in INPUTS],
            outputs=[_metadata(*each) for each in OUTPUTS],
        )

    async def ModelConfig(self, request: oip.ModelConfigRequest, context: Any) -> oip.ModelConfigResponse:
        model = self._service.models.find(request.name, call_of(context))
        _check_version(request.version)
        return oip.ModelConfigResponse(config=model_config(model.name, PLATFORM))

    async def ModelStatistics(self, request: oip.ModelStatisticsRequest, context: Any) -> oip.ModelStatisticsResponse:
        call = call_of(context)
        _check_version(request.version)
        models = self._service.models
        names = [models.find(request.name, call).name] if request.name else models.usable_by(call)
        reply = oip.ModelStatisticsResponse()
        for name in names:
            stats = reply.model_stats.add()
            stats.CopyFrom(self._statistics(name))
            stats.name, stats.version = name, VERSION
        return reply

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        given = (header_of(context), context.time_remaining(), call_of(context), caller_of(context))
        infer = partial(self._infer, request, *given)

        async def run() -> AsyncGenerator[oip.ModelInferResponse, None]:
            yield await infer()

        parts = self._keyed.answer(f"{SERVICE}/ModelInfer", oip.ModelInferResponse, request, context, run)
        [whole] = [each async for each in parts]
        return whole

    async def _infer(
        self,
        request: oip.ModelInferRequest,
        header: Callable[[str], str | None],
        remaining_s: float | None,
        call: Call | None,
        caller: str,
    ) -> oip.ModelInferResponse:
        with self._limit.of(caller):
            terms = self._service.terms(header, remaining_s, call)
            parsed = self._parse(request, terms.call)
            parts = [part async for part in self._answer(parsed, terms)]
            return _response(parsed, [piece for pieces, _ in parts for piece in pieces], parts[-1][1])

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[oip.ModelInferRequest], context: Any
    ) -> AsyncIterator[oip.ModelStreamInferResponse]:
        """Answers one request after the other; for concurrent requests a client opens several streams. An idle stream
        does not count as a running call. Each request is authenticated, as a stream may outlast its key, and ends the
        stream if it is not."""
        if has_key(context):
            raise InputError(f"{HEADER}: expected only with ModelInfer; a stream has many requests", field=HEADER)
        async for request in request_iterator:
            async for reply in self._stream(request, context):
                yield reply

    async def _stream(
        self, request: oip.ModelInferRequest, context: Any
    ) -> AsyncIterator[oip.ModelStreamInferResponse]:
        call, header = call_of(context), header_of(context)
        try:
            with self._limit.of(caller_of(context)):
                if call is not None:
                    await self._service.calls.authenticate(call, header("authorization"), is_again=True)
                terms = self._service.terms(header, context.time_remaining(), call)
                parsed = self._parse(request, call)
                async for pieces, reason in self._answer(parsed, terms):
                    reply = _response(parsed, pieces, reason)
                    reply.parameters["triton_final_response"].bool_param = reason is not None
                    yield oip.ModelStreamInferResponse(infer_response=reply)
        except TandemError as error:
            if call is not None:
                call.refused(error.code)
            if isinstance(error, Unauthenticated | PermissionDenied):
                raise
            failed = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
            yield oip.ModelStreamInferResponse(error_message=error.message, infer_response=failed)
        if call is not None:
            self._service.calls.spend(call)  # the stream, and with it the call, may go on for hours

    async def _answer(
        self, parsed: InferRequest, terms: RequestTerms
    ) -> AsyncIterator[tuple[list[TextPiece], str | None]]:
        """The pieces as they arrive, with the finish reason at the end."""
        answers = await self._service.submit_all([parsed.raw], 1, new_request_id(), terms)
        try:
            while not answers.ended:
                for arrival in await answers.next():
                    yield list(arrival.pieces), None if arrival.final is None else arrival.final.reason.value
        finally:
            answers.cancel()  # also on the client's cancellation and deadline

    def _parse(self, request: oip.ModelInferRequest, call: Call | None) -> InferRequest:
        if call is not None:
            call.name_model(request.model_name)
        models = self._service.models
        with self._service.rejections_of(request.model_name):
            _check_version(request.model_version)
            return parse_infer(request, lambda count: models.check_tokens(request.model_name, count, call))


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(f"model_version: expected {VERSION!r} or none, got {version[:40]!r}", field="model_version")


def _metadata(name: str, datatype: str, shape: Iterable[int]) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=shape)


def _response(parsed: InferRequest, pieces: list[TextPiece], reason: str | None) -> oip.ModelInferResponse:
    token_ids = [token.token_id for token in tokens_of(pieces)]
    return response(parsed, parsed.raw.model, text=text_of(pieces), token_ids=token_ids, reason=reason)
