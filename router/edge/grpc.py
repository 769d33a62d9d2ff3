"""`tandem.v1.Inference`, the gRPC contract of Tandem's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from router.auth.call import Call
from router.auth.grpc_gate import call_of, header_of
from router.edge.grpc_chat import ChatParts, chat_of, parsed_json
from router.edge.keyed_grpc import KeyedCalls
from router.edge.limits.grpc_arrivals import caller_of
from router.edge.limits.grpc_calls import CallLimit
from router.edge.write_pauses import WritePauses
from router.request_terms import RequestTerms
from router.requests.answers import AnswerReader, SubmittedRequest
from router.requests.output import Final, OutToken, TextPiece
from router.requests.raw_request import MAX_CACHE_SALT_CHARS, PREDICTION, Prompt, RawRequest, RawSampling
from router.service import RouterService
from router.texts.chat import Chat
from router.texts.json_limits import check_texts
from tandem.config.model import Role
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, choice, grammar, json_object, json_schema_text, regex
from tandem.grammar.structural_tag import MAX_STRUCTURES, Structure, structural_tag
from tandem.request import FinishReason, check_length
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer
from tandem.version import tandem_version

SERVICE = "tandem.v1.Inference"
SLICE_LOGPROBS = 4096  # in one message: under 1 ms of work, 50 KB

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class InferenceEdge(InferenceServicer):
    """GuardedServer answers the client with the errors that the methods raise."""

    def __init__(self, service: RouterService, limit: CallLimit, keyed: KeyedCalls, pauses: WritePauses) -> None:
        self._service = service
        self._limit = limit
        self._keyed = keyed
        self._pauses = pauses

    def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        given = (header_of(context), context.time_remaining(), call_of(context), caller_of(context))
        run = partial(self._generate, request, *given)
        return self._keyed.answer(f"{SERVICE}/Generate", pb.GenerateResponse, request, context, run)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        header: Callable[[str], str | None],
        remaining_s: float | None,
        call: Call | None,
        caller: str,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        pauses = self._pauses
        with self._limit.of(caller):
            terms = self._service.terms(header, remaining_s, call)
            raw = await self._parsed(request, terms)
            submitted = await self._service.submit(raw, terms, model_required=False)
            stream, reader = submitted.stream, AnswerReader(submitted.request.reading, submitted.request.request_id)
            parts = None if reader.is_plain else ChatParts(reader)
            try:
                yield _started(submitted)
                stream.keep_times()
                has_prompt_logprobs = False
                while pieces := await stream.next():
                    if not has_prompt_logprobs:
                        has_prompt_logprobs = True
                        for response in _prompt_logprobs(stream.prompt_scores):
                            yield response
                    response = _chunk(pieces, stream.take_times())
                    yield response if parts is None else parts.chunk(response)
                    pauses.measure(len(pieces))
                    if pauses.pause_s and stream.final is None:
                        await pauses.pause()
                if (final := stream.final) is not None:
                    finished = _finished(final)
                    if parts is not None:
                        if (rest := parts.rest()) is not None:
                            yield rest
                        if reader.has_calls and final.reason is FinishReason.STOP:
                            finished.reason = pb.FINISH_REASON_TOOL_CALLS
                    yield pb.GenerateResponse(finished=finished)
            finally:
                stream.cancel()  # also on the client's cancellation and deadline

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._service.take_request(call_of(context))
        if not request.prompt and not request.chat.messages:
            raise InputError("input: expected prompt or chat, got neither", field="input")
        call = call_of(context)
        tenant, size = "" if call is None else call.tenant, request.chat.ByteSize()
        prompt: str | Chat = request.prompt
        if not prompt:
            prompt = await self._service.threads.parse(tenant, size, partial(chat_of, request.chat))
        model, token_ids = await self._service.tokenize(request.model, prompt, call)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_tokens=model.max_model_tokens)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        call = call_of(context)
        cards = [
            pb.ModelCard(
                name=model.name,
                max_model_tokens=model.max_model_tokens,
                vocab_tokens=model.vocab_tokens,
                ready=self._service.models.is_ready(model.name),
                parent=self._service.models.parent(model, call) or "",
                input_modalities=self._service.models.input_modalities(model),
            )
            for model in self._service.models.usable_by(call).values()
        ]
        return pb.ListModelsResponse(models=cards)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        fleet = self._service.dispatcher.fleet
        return pb.GetServerInfoResponse(
            version=tandem_version(),
            cluster=self._service.cluster,
            router_id=self._service.router_id,
            prefill_workers=fleet.count_ready(Role.PREFILL),
            decode_workers=fleet.count_ready(Role.DECODE),
        )

    async def _parsed(self, request: pb.GenerateRequest, terms: RequestTerms) -> RawRequest:
        if terms.call is not None:
            terms.call.name_model(request.model)
        with self._service.rejections_of(request.model):
            self._service.models.check_tokens(request.model, len(request.token_ids.ids), terms.call)
            predicted = len(request.prediction.token_ids.ids)
            self._service.models.check_tokens(request.model, predicted, terms.call, field=PREDICTION)
            check_length("cache_salt", len(request.cache_salt), MAX_CACHE_SALT_CHARS)
            size = request.chat.ByteSize() + request.constraint.ByteSize()  # they hold JSON
            return await self._service.threads.parse(terms.tenant, size, partial(_raw, request))


def _raw(request: pb.GenerateRequest) -> RawRequest:
    sampling = _sampling(request.sampling, _constraint(request.constraint))
    prediction = _prediction(request.prediction) if request.HasField("prediction") else None
    return RawRequest(
        request.model, _prompt(request), sampling, request.user, request.cache_salt, prediction=prediction
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "token_ids":
            return tuple(request.token_ids.ids)
        case "chat":
            if not request.chat.messages:
                raise InputError("chat: expected at least one message, got none", field="chat")
            return chat_of(request.chat)
        case _:
            raise InputError("input: expected prompt, token_ids or chat, got none of them", field="input")


def _prediction(given: pb.Prediction) -> str | tuple[int, ...]:
    match given.WhichOneof("content"):
        case "text":
            return given.text
        case "token_ids":
            return tuple(given.token_ids.ids)
        case _:
            raise InputError("prediction: expected text or token_ids, got neither", field=PREDICTION)


def _constraint(given: pb.Constraint) -> Constraint | None:
    """Raises InputError."""
    match given.WhichOneof("kind"):
        case "json_schema":
            return json_schema_text(given.json_schema, "constraint.json_schema")
        case "json_object":
            if not given.json_object:
                raise InputError(
                    "constraint.json_object: expected true, or no constraint", field="constraint.json_object"
                )
            return json_object("constraint.json_object")
        case "regex":
            return regex(given.regex, "constraint.regex")
        case "choice":
            return choice(given.choice.texts, "constraint.choice")
        case "grammar":
            return grammar(given.grammar, "constraint.grammar")
        case "structural_tag":
            return _structural_tag(given.structural_tag, "constraint.structural_tag")
        case _:
            return None


def _structural_tag(given: pb.StructuralTag, field: str) -> Constraint:
    check_length(f"{field}.structures", len(given.structures), MAX_STRUCTURES)
    schemas = [(f"{field}.structures.{at}.schema", each.schema) for at, each in enumerate(given.structures)]
    check_texts(schemas)
    structures = [
        Structure(each.begin, parsed_json(text or '{"type": "object"}', where), each.end)
        for each, (where, text) in zip(given.structures, schemas, strict=True)
    ]
    return structural_tag(structures, given.triggers, field)


def _sampling(given: pb.SamplingParams, constraint: Constraint | None) -> RawSampling:
    return RawSampling(
        temperature=given.temperature if given.HasField("temperature") else None,
        top_p=given.top_p if given.HasField("top_p") else None,
        top_k=given.top_k if given.HasField("top_k") else None,
        min_p=given.min_p if given.HasField("min_p") else None,
        seed=given.seed if given.HasField("seed") else None,
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        ignore_eos=given.ignore_eos,
        min_tokens=given.min_tokens,
        presence_penalty=given.presence_penalty if given.HasField("presence_penalty") else None,
        frequency_penalty=given.frequency_penalty if given.HasField("frequency_penalty") else None,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else None,
        logit_bias=tuple(given.logit_bias.items()),
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
        constraint=constraint,
    )


def _started(submitted: SubmittedRequest) -> pb.GenerateResponse:
    request = submitted.request
    started = pb.Started(request_id=request.request_id, model=submitted.model.name, prompt_tokens=request.prompt_tokens)
    return pb.GenerateResponse(started=started)


def _prompt_logprobs(scores: Sequence[pb.TokenLogprobs]) -> Iterator[pb.GenerateResponse]:
    """In slices, as there may be megabytes of them. Other calls have their turns while one is written."""
    if scores:
        tokens = max(1, SLICE_LOGPROBS // (1 + len(scores[0].top)))
        for at in range(0, len(scores), tokens):
            yield pb.GenerateResponse(chunk=pb.Chunk(prompt_logprobs=scores[at : at + tokens]))


def _chunk(pieces: Sequence[TextPiece], times_s: Sequence[float]) -> pb.GenerateResponse:
    """Filled in place, which takes a third of the time: there may be one per token."""
    response = pb.GenerateResponse()
    chunk = response.chunk
    chunk.text = pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])
    for piece in pieces:
        for token in piece.tokens:
            chunk.token_ids.append(token.token_id)
            if token.logprob is not None:
                chunk.logprobs.append(_logprobs(token))
    if len(pieces) > 1 and len(chunk.token_ids) > 1:
        end = 0
        for piece, at_s in zip(pieces, times_s, strict=True):
            end += len(piece.text)
            for _ in piece.tokens:
                chunk.text_ends.append(end)
                chunk.after_s.append(at_s - times_s[0])
    return response


def _logprobs(token: OutToken) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=each.token_id, logprob=each.logprob) for each in token.top]
    return pb.TokenLogprobs(token_id=token.token_id, logprob=token.logprob or 0.0, top=top)


def _finished(final: Final) -> pb.Finished:
    usage, line = final.usage, final.timeline
    return pb.Finished(
        reason=_REASONS[final.reason],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            accepted_tokens=usage.accepted_tokens,
            unused_tokens=usage.unused_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
        timeline=pb.Timeline(
            queue_s=line.queue_s,
            prefill_s=line.prefill_s,
            handoff_s=line.handoff_s,
            decode_s=line.decode_s,
            ttft_s=line.ttft_s,
            total_s=line.total_s,
            kv_bytes_moved=line.kv_bytes_moved,
            kv_blocks_moved=line.kv_blocks_moved,
            cached_tokens_prefill=line.cached_tokens_prefill,
            cached_tokens_decode=line.cached_tokens_decode,
            prefill_worker=line.prefill_worker,
            decode_worker=line.decode_worker,
        ),
    )
