"""Converts the Worker protocol's messages to the engine's types and back. Parsed once, trusted afterwards."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.causes import HandoffFault, parse_cause
from tandem.engine.api import Capability, EngineLoad, EngineRequest, PromptScores, TokenOut
from tandem.errors import ErrorCode, InputError, TandemError, error_from_code
from tandem.images import ExpandedPrompt, PromptImage
from tandem.kvcache.blockhash import HashKey
from tandem.request import FinishReason, SamplingParams, TokenLogprob
from tandem.rpc.versions import Versions
from tandem.v1 import cluster_pb2, inference_pb2, worker_pb2

PROTOCOL_VERSION = 4  # 2: penalties, logit_bias, prompt_logprobs; 3: hold, move, resume; 4: grammar, min_tokens
VERSIONS = Versions(PROTOCOL_VERSION, oldest_protocol=3)
GRAMMAR_SINCE = 4
BEFORE_RANGES = 3  # of workers whose registration names no version

FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def lacks(info: cluster_pb2.WorkerInfo) -> frozenset[Capability]:
    """What the worker's engine cannot do."""
    if not info.HasField("can"):  # from before there were any
        return frozenset({Capability.EMBEDDINGS, Capability.IMAGES})
    return frozenset(each for each in Capability if each.value not in info.can.names)


def parse_sampling(wire: worker_pb2.ResolvedSampling) -> SamplingParams:
    """Raises InputError. Routers' values are checked too, so a faulty router cannot harm the engine."""
    return SamplingParams.parse(
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k or None,
        min_p=wire.min_p,
        stop_token_ids=frozenset(wire.stop_token_ids),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else None,
        logit_bias=wire.logit_bias,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        grammar=wire.grammar if wire.HasField("grammar") else None,
        min_tokens=wire.min_tokens,
        embeds=wire.embeds,
    )


def sampling_frame(sampling: SamplingParams) -> worker_pb2.ResolvedSampling:
    wire = worker_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
        min_tokens=sampling.min_tokens,
        embeds=sampling.embeds,
    )
    if sampling.logit_bias:  # even an empty map would cost as much as all other fields together
        wire.logit_bias.update(sampling.logit_bias)
    return wire


def parse_work(
    work: worker_pb2.Work,
    *,
    engine_id: str,
    model_fingerprint: str,
    use_prefix_cache: bool = True,
    export_from_block: int | None = None,
) -> EngineRequest:
    if not work.prompt:
        raise InputError("prompt: expected at least one token, got none", field="prompt")
    return EngineRequest(
        request_id=engine_id,
        prompt=tuple(work.prompt),
        sampling=parse_sampling(work.sampling),
        hash_key=HashKey(model_fingerprint, work.adapter, work.cache_salt),
        use_prefix_cache=use_prefix_cache,
        export_from_block=export_from_block,
        answered_tokens=work.answer_tokens,
        prediction=tuple(work.prediction),
        images=parse_images(work),
    )


def parse_images(work: worker_pb2.Work) -> tuple[PromptImage, ...]:
    return tuple(PromptImage.of(each.start, each.tokens, each.data) for each in work.images)


def expanded_frame(request_id: str, expanded: ExpandedPrompt | TandemError) -> worker_pb2.ImagesExpanded:
    if isinstance(expanded, TandemError):
        return worker_pb2.ImagesExpanded(request_id=request_id, error=error_message(expanded))
    places = [worker_pb2.Image(start=start, tokens=tokens) for start, tokens in expanded.spans]
    return worker_pb2.ImagesExpanded(request_id=request_id, prompt=expanded.tokens, images=places)


def parse_expanded(frame: worker_pb2.ImagesExpanded) -> ExpandedPrompt:
    """Raises the worker's error."""
    if frame.HasField("error"):
        raise parse_error(frame.error)
    return ExpandedPrompt(tuple(frame.prompt), tuple((each.start, each.tokens) for each in frame.images))


def token_frame(request_id: str, token: TokenOut) -> worker_pb2.StepToken:
    frame = worker_pb2.StepToken(request_id=request_id, token_id=token.token_id)
    if token.cached_tokens is not None:
        frame.cached_tokens = token.cached_tokens
    if (proposals := token.proposals) is not None:
        frame.proposed_tokens, frame.accepted_tokens = proposals.proposed, proposals.accepted
        frame.from_prediction = proposals.from_prediction
    if token.embedding:
        frame.embedding = token.embedding
    if token.logprob is not None:
        _fill(frame.logprobs, token.token_id, token.logprob, token.top)
    return frame


def scores_frame(request_id: str, scores: PromptScores) -> worker_pb2.PromptScores:
    frame = worker_pb2.PromptScores(request_id=request_id, start=scores.start)
    for token in scores.tokens:
        _fill(frame.tokens.add(), token.token_id, token.logprob, token.top)
    return frame


def _fill(wire: inference_pb2.TokenLogprobs, token_id: int, logprob: float, top: Iterable[TokenLogprob]) -> None:
    wire.token_id, wire.logprob = token_id, logprob
    for each in top:
        wire.top.add(token_id=each.token_id, logprob=each.logprob)


def error_frame(request_id: str, error: TandemError) -> worker_pb2.Ended:
    return worker_pb2.Ended(request_id=request_id, error=error_message(error))


def error_message(error: TandemError) -> worker_pb2.WorkerError:
    wire = worker_pb2.WorkerError(code=error.code.value, message=error.message, field=error.field or "")
    if isinstance(error, HandoffFault):
        wire.cause = error.cause.value
    return wire


def parse_error(wire: worker_pb2.WorkerError) -> TandemError:
    """Returns the typed error; for a failed handoff with its cause, where the worker sent one."""
    if wire.code == ErrorCode.HANDOFF_FAILED and wire.HasField("cause"):
        return HandoffFault(parse_cause(wire.cause), wire.message)
    return error_from_code(wire.code, wire.message, wire.field)


def load_frame(load: EngineLoad, steps: int) -> worker_pb2.WorkerLoad:
    blocks = load.blocks
    return worker_pb2.WorkerLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        waiting_tokens=load.waiting_tokens,
        reserved_requests=load.reserved_requests,
        blocks=worker_pb2.BlockCounts(
            free=blocks.free,
            cached=blocks.cached,
            leased=blocks.leased,
            in_use=blocks.in_use,
            total=blocks.total,
        ),
        steps=steps,
        host_blocks=worker_pb2.HostBlocks(free=load.host.free, used=load.host.used, total=load.host.total),
    )


def reach_frame(epochs: Iterable[tuple[str, int]]) -> worker_pb2.Reach:
    """`epochs`: pairs of worker id and epoch."""
    return worker_pb2.Reach(
        lives=[worker_pb2.WorkerLife(worker_id=worker_id, epoch=epoch) for worker_id, epoch in sorted(epochs)]
    )
