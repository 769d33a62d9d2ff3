"""The gRPC edge: tandem.v1.Inference, the Open Inference Protocol, health checking and reflection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from router.auth.call import Call
from router.auth.call_gate import CallGate
from router.auth.grpc_gate import GrpcGate, call_of, header_of
from router.edge.controller_api import TracesEdge
from router.edge.grpc_chat import ChatParts, chat_of, parsed_json
from router.edge.keyed_grpc import KeyedCalls, Run, has_key
from router.edge.limits.bodies import BodyBudget
from router.edge.limits.grpc import MAX_IDLE_S, GuardedServer
from router.edge.limits.grpc_arrivals import Arrivals, MessageBudget
from router.edge.limits.grpc_calls import CallLimit
from router.edge.oip import SERVICE as OIP_SERVICE
from router.edge.oip import OipEdge, StatisticsOf
from router.edge.tls import EdgeTls
from router.edge.write_pauses import WritePauses
from router.idempotency.keyed_answers import KeyedAnswers
from router.request_terms import RequestTerms
from router.requests.answers import AnswerReader, SubmittedRequest
from router.requests.output import Final, OutToken, TextPiece
from router.requests.validation import MAX_CACHE_SALT_CHARS, Prompt, RawRequest, RawSampling
from router.service import RouterService
from router.texts.chat import Chat
from tandem.config.spec import Role
from tandem.errors import InputError, PortInUse
from tandem.grammar.constraint import Constraint, choice, grammar, json_object, json_schema_text, regex
from tandem.grammar.structural_tag import MAX_STRUCTURES, Structure, structural_tag
from tandem.oip.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from tandem.request import FinishReason, check_length
from tandem.rpc.grpc_tls import ClusterTls
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from tandem.v1.trace_pb2_grpc import add_TracesServicer_to_server
from tandem.version import tandem_version

SERVICE = "tandem.v1.Inference"
MAX_GENERATE_CALLS = 256  # with more, grpc.aio was seen to cancel calls itself
MAX_CALLS = 512
MAX_STREAMS = 256  # that take several messages, mostly idle; each may hold one that is unfinished
MAX_PUBLIC_STREAMS = 256  # health watches and reflection
SHARE_OF_ONE = 4  # one key, or one address without keys, may hold a quarter of either kind of stream
MAX_PUBLIC_WAITS = 64
PUBLIC_MESSAGE_S = 1.0  # a probe sends its few bytes with its headers
MAX_OPEN_CALLS = 8192  # a finished call counts until its client has read the end
SHUTDOWN_GRACE_S = 5.0
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
        run = partial(self._generate, request, header_of(context), context.time_remaining(), call_of(context))
        return self._generate_once(request, context, run) if has_key(context) else run()

    async def _generate_once(
        self, request: pb.GenerateRequest, context: Any, run: Run
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._keyed.messages(f"{SERVICE}/Generate", request, context, run)) as messages:
            async for message in messages:
                yield pb.GenerateResponse.FromString(message)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        header: Callable[[str], str | None],
        remaining_s: float | None,
        call: Call | None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        pauses = self._pauses
        with self._limit:
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
                    pauses.wrote()
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
        cards = [
            pb.ModelCard(
                name=model.name,
                max_model_tokens=model.max_model_tokens,
                vocab_tokens=model.vocab_tokens,
                ready=self._service.model_ready(model.name),
            )
            for model in self._service.models_for(call_of(context)).values()
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
        try:
            self._service.check_tokens(request.model, len(request.token_ids.ids), terms.call)
            check_length("cache_salt", len(request.cache_salt), MAX_CACHE_SALT_CHARS)
            size = request.chat.ByteSize() + request.constraint.ByteSize()  # they hold JSON
            return await self._service.threads.parse(terms.tenant, size, partial(_raw, request))
        except InputError as error:
            self._service.rejected(request.model, error)
            raise


def _raw(request: pb.GenerateRequest) -> RawRequest:
    sampling = _sampling(request.sampling, _constraint(request.constraint))
    return RawRequest(request.model, _prompt(request), sampling, request.user, request.cache_salt)


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
    structures = [
        Structure(
            each.begin, parsed_json(each.schema or '{"type": "object"}', f"{field}.structures.{at}.schema"), each.end
        )
        for at, each in enumerate(given.structures)
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


def _streams(most: int) -> CallLimit:
    return CallLimit(most, most // SHARE_OF_ONE, "open streams")


class GrpcServer:
    def __init__(
        self,
        service: RouterService,
        traces: TracesEdge,
        keyed: KeyedAnswers,
        statistics: StatisticsOf,
        *,
        host: str,
        port: int,
        max_message_bytes: int,
        bodies: BodyBudget,
        max_connections: int,
        client_timeout_s: float,
        pauses: WritePauses | None = None,
        tls: EdgeTls | None = None,
        controller_socket: str | None = None,
        control_address: str | None = None,
        cluster_tls: ClusterTls | None = None,
    ) -> None:
        """`controller_socket`: path of a socket for the controller, without TLS. `control_address`: host:port for it,
        with `cluster_tls`. Raises PortInUse."""
        calls = service.calls
        self._server = grpc.aio.server(
            interceptors=[GrpcGate(calls)] if calls.is_watching else [],
            options=(
                ("grpc.so_reuseport", 0),  # else two servers on one port would share its traffic
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", MAX_CALLS),  # per connection
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.server_handshake_timeout_ms", round(client_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", round(MAX_IDLE_S * 1000)),  # a client's channel reconnects itself
            ),
            maximum_concurrent_rpcs=MAX_OPEN_CALLS,
        )

        def guard(max_calls: int, gate: CallGate | None = None, **limits: Any) -> grpc.aio.Server:
            return cast(grpc.aio.Server, GuardedServer(self._server, max_calls, client_timeout_s, gate, **limits))

        limit, budget = CallLimit(MAX_GENERATE_CALLS), MessageBudget(bodies, max_message_bytes)
        guarded = guard(
            MAX_CALLS,
            calls,
            arrivals=Arrivals(MAX_CALLS, client_timeout_s, setting="router.client_timeout_s", budget=budget),
            streams=_streams(MAX_STREAMS),
        )
        keyed_calls = KeyedCalls(keyed, service)
        add_InferenceServicer_to_server(InferenceEdge(service, limit, keyed_calls, pauses or WritePauses()), guarded)
        add_GRPCInferenceServiceServicer_to_server(OipEdge(service, limit, keyed_calls, statistics), guarded)
        # With limits of their own, so that requests cannot displace probes and the controller.
        separate = guard(MAX_OPEN_CALLS, admit=traces.check)
        add_TracesServicer_to_server(traces, separate)
        # Needs no key, and its streams have no end.
        streams = _streams(MAX_PUBLIC_STREAMS)
        arrivals = Arrivals(MAX_PUBLIC_WAITS, PUBLIC_MESSAGE_S)
        public = guard(MAX_CALLS, arrivals=arrivals, streams=streams, answers=streams)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, public)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (SERVICE, OIP_SERVICE, health_name, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), public)
        self.port: int = self._listen(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "router.grpc_port", tls)
        if controller_socket is not None:
            self._server.add_insecure_port(f"unix:{controller_socket}")
        self.control_port = 0
        if control_address is not None:
            self.control_port = self._listen(control_address, "--control-port", cluster_tls)

    def _listen(self, address: str, field: str, tls: EdgeTls | ClusterTls | None) -> int:
        """Returns the port. Raises PortInUse."""
        try:
            if tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError:
            raise PortInUse(
                f"{field}: cannot listen on {address}; free it or choose another port", field=field
            ) from None

    async def start(self) -> None:
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Sets the health status of the whole server and of each service that generates."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE, OIP_SERVICE):
            await self._health.set(name, status)

    async def close(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(SHUTDOWN_GRACE_S)
