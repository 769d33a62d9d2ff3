"""vLLM's gRPC contract (`vllm.Inference`) on the router's gRPC port, for its clients and for gateways that speak it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any

from router.auth.call import Call
from router.auth.grpc_gate import call_of, header_of
from router.edge.keyed_grpc import KeyedCalls, Run
from router.edge.limits.grpc_arrivals import caller_of
from router.edge.limits.grpc_calls import CallLimit
from router.edge.vllm_messages import AnswerMessages, model_of, raw_request, with_field_of_request
from router.edge.write_pauses import WritePauses
from router.request_ids import new_request_id
from router.request_terms import RequestTerms
from router.requests.answers import SubmittedRequest
from router.requests.serving_model import ServingModel
from router.service import RouterService
from tandem.errors import InputError, InternalError
from tandem.vllm_api import inference_pb2 as pb
from tandem.vllm_api.inference_pb2_grpc import InferenceServicer

SERVICE = "vllm.Inference"
SLICE_SCORES = 256  # tokens of a prompt, each with at most 20 alternatives: about 5 ms


class VllmEdge(InferenceServicer):
    """GuardedServer answers the client with the errors that the methods raise."""

    def __init__(self, service: RouterService, limit: CallLimit, keyed: KeyedCalls, pauses: WritePauses) -> None:
        self._service = service
        self._limit = limit
        self._keyed = keyed
        self._pauses = pauses

    def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        run = self._run(request, context)
        return self._keyed.answer(f"{SERVICE}/GenerateStream", pb.GenerateResponse, request, context, run)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        run = self._run(request, context)
        parts = self._keyed.answer(f"{SERVICE}/Generate", pb.GenerateResponse, request, context, run)
        whole: pb.GenerateResponse | None = None
        texts, tokens = [], 0
        async for part in parts:
            texts.append(part.outputs.text)
            tokens += part.outputs.num_tokens
            if whole is None:
                whole = part
            else:
                whole.MergeFrom(part)  # joins lists, and keeps the last of what is no list
        if whole is None:
            raise InternalError("an answer without an end")
        whole.outputs.text, whole.outputs.num_tokens = "".join(texts), tokens
        return whole

    def _run(self, request: pb.GenerateRequest, context: Any) -> Run[pb.GenerateResponse]:
        given = (header_of(context), context.time_remaining(), call_of(context), caller_of(context))
        return partial(self._generate, request, *given)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        header: Callable[[str], str | None],
        remaining_s: float | None,
        call: Call | None,
        caller: str,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        with self._limit.of(caller):
            terms = self._service.terms(header, remaining_s, call)
            submitted = await self._submitted(request, terms)
            stream = submitted.stream
            eos_ids = frozenset[int]() if request.stopping.ignore_eos else submitted.model.eos_token_ids
            messages = AnswerMessages(submitted.request, request.response, eos_ids)
            try:
                scores = None
                while pieces := await stream.next():
                    if scores is None:
                        scores = stream.prompt_scores  # set before the first piece
                        for at in range(0, len(scores), SLICE_SCORES):
                            messages.score_prompt(scores[at : at + SLICE_SCORES])
                            await asyncio.sleep(0)  # other calls have their turns
                    yield messages.part(pieces)
                    self._pauses.measure(len(pieces))
                    if self._pauses.pause_s and stream.final is None:
                        await self._pauses.pause()
                if (final := stream.final) is not None:
                    yield messages.end(final, stream.stop_string)
            finally:
                stream.cancel()  # also on the client's cancellation and deadline

    async def _submitted(self, request: pb.GenerateRequest, terms: RequestTerms) -> SubmittedRequest:
        """Raises as RouterService.submit_all."""
        asked, call = model_of(request), terms.call
        if call is not None:
            call.name_model(asked)
        with self._service.rejections_of(asked):
            model = self._model(request, call)
            model.check_tokens("prompt", len(request.token_ids.ids))
            parse = partial(raw_request, request, model.name)
            raw = await self._service.threads.parse(terms.tenant, request.decoding.ByteSize(), parse)
        try:
            answers = await self._service.submit_all([raw], 1, new_request_id(), terms)
        except InputError as error:
            raise with_field_of_request(error) from None
        return answers.submitted[0]

    def _model(self, request: pb.GenerateRequest, call: Call | None) -> ServingModel:
        """Raises InputError for an adapter of another model."""
        found = self._service.models.find(model_of(request), call, required=False)
        if request.lora_name and (not found.adapter or request.model not in ("", found.base, found.name)):
            raise InputError(
                f"lora_name: expected an adapter of {request.model[:80] or 'a model'}, got {request.lora_name[:80]!r}",
                field="lora_name",
            )
        return found
