"""Converts requests of vLLM's gRPC contract to ours, and answers to its messages. Pure.

What Tandem cannot serve is refused with the name of its field: vLLM's messages nest, as `decoding.allowed_token_ids`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from router.edge.body_parsing import parse_body
from router.edge.openai.constraint_fields import StructuralTag
from router.edge.strict_model import unsupported
from router.requests.output import Final, OutToken, TextPiece
from router.requests.raw_request import MAX_CACHE_SALT_CHARS, Prompt, RawRequest, RawSampling, ValidRequest
from tandem.errors import InputError, shown
from tandem.grammar.constraint import Constraint, choice, grammar, json_object, json_schema_text, regex
from tandem.request import MAX_LOGPROBS, FinishReason, check_length
from tandem.v1 import inference_pb2
from tandem.vllm_api import inference_pb2 as pb

_GREEDY = 0.0  # vLLM's temperature if a request has none
_SALT_BYTES = 16
_THEIR_FIELDS = {
    "max_tokens": "stopping.max_new_tokens",
    "min_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop_strings",
    "stop_token_ids": "stopping.stop_token_ids",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "presence_penalty": "decoding.presence_penalty",
    "frequency_penalty": "decoding.frequency_penalty",
    "repetition_penalty": "decoding.repetition_penalty",
    "logit_bias": "decoding.logit_bias",
}


def model_of(request: pb.GenerateRequest) -> str:
    """An adapter is a model of its own name."""
    return request.lora_name or request.model


def raw_request(request: pb.GenerateRequest, model: str) -> RawRequest:
    """Raises InputError, UnsupportedField."""
    _refuse(request)
    check_length("kv.cache_salt", len(request.kv.cache_salt), MAX_CACHE_SALT_CHARS)
    # A salt of its own finds no blocks of others.
    salt = secrets.token_hex(_SALT_BYTES) if request.kv.bypass_prefix_cache else request.kv.cache_salt
    return RawRequest(model, _prompt(request), _sampling(request), request.session_id, salt)


def _refuse(request: pb.GenerateRequest) -> None:
    decoding, stopping, asked = request.decoding, request.stopping, request.response
    if request.sampling.num_sequences > 1:
        raise unsupported("sampling.num_sequences", "more than one", "send the request several times")
    budget = stopping.thinking_token_budget if stopping.HasField("thinking_token_budget") else -1
    given = {
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "priority": request.priority,
        "media": request.media,
        "kv_hints": request.HasField("kv_hints"),
        "engine_reasoning_gate": request.HasField("engine_reasoning_gate"),
        "decoding.allowed_token_ids": decoding.allowed_token_ids,
        "decoding.bad_words_token_ids": decoding.bad_words_token_ids,
        "stopping.include_stop_strings": stopping.include_stop_strings,
        "stopping.thinking_token_budget": budget != -1,
        "response.skip_special_tokens": asked.HasField("skip_special_tokens") and not asked.skip_special_tokens,
        "kv.kv_transfer_params": request.kv.HasField("kv_transfer_params"),
        "kv.ec_transfer_params": request.kv.HasField("ec_transfer_params"),
    }
    if refused := next((field for field, value in given.items() if value), None):
        raise unsupported(refused)


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            raise InputError("prompt: expected text or token_ids, got neither", field="prompt")


def _sampling(request: pb.GenerateRequest) -> RawSampling:
    drawn, decoding, stopping, asked = request.sampling, request.decoding, request.stopping, request.response
    return RawSampling(
        temperature=request.temperature if request.HasField("temperature") else _GREEDY,
        top_p=drawn.top_p if drawn.HasField("top_p") else None,
        top_k=drawn.top_k if drawn.HasField("top_k") else None,
        min_p=drawn.min_p if drawn.HasField("min_p") else None,
        seed=drawn.seed if drawn.HasField("seed") else None,
        max_tokens=stopping.max_new_tokens or None,
        min_tokens=stopping.min_new_tokens,
        stop=tuple(stopping.stop_strings),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        presence_penalty=decoding.presence_penalty or None,
        frequency_penalty=decoding.frequency_penalty or None,
        repetition_penalty=decoding.repetition_penalty or None,
        logit_bias=tuple(decoding.logit_bias.items()),
        logprobs=_candidates(asked, "output"),
        prompt_logprobs=_candidates(asked, "prompt"),
        constraint=_constraint(decoding),
    )


def _candidates(asked: pb.ResponseOptions, part: str) -> int | None:
    """How many tokens are told beside the one in the text; None: no logprobs."""
    field = f"response.{part}_candidates"
    given: pb.CandidateTokens = getattr(asked, f"{part}_candidates")
    kind = given.WhichOneof("select")
    if not getattr(asked, f"{part}_logprobs"):
        return None
    match kind:
        case "token_ids" if given.token_ids.ids:
            raise unsupported(f"{field}.token_ids", "this choice", "send top_n")
        case "all" if given.all:
            raise unsupported(f"{field}.all", "this choice", "send top_n")
        case "top_n" if given.top_n <= MAX_LOGPROBS:
            return given.top_n
        case "top_n":
            field = f"{field}.top_n"
            raise InputError(f"{field}: expected at most {MAX_LOGPROBS}, got {shown(given.top_n)}", field=field)
        case _:
            return 0


def _constraint(given: pb.DecodingParameters) -> Constraint | None:
    kind = given.WhichOneof("structured_output")
    field = f"decoding.{kind}"
    match kind:
        case "json":
            return json_schema_text(given.json, field)
        case "regex":
            return regex(given.regex, field)
        case "choice":
            return choice(given.choice.choices, field)
        case "grammar":
            return grammar(given.grammar, field)
        case "json_object" if given.json_object:
            return json_object(field)
        case "structural_tag":
            return _structural_tag(given.structural_tag, field)
        case _:
            return None


def _structural_tag(text: str, field: str) -> Constraint:
    try:
        tag = parse_body(StructuralTag, text.encode())
    except InputError as error:
        raise InputError(f"{field}: {error.message}", field=field) from None
    return tag.constraint(field)


def with_field_of_request(error: InputError) -> InputError:
    """Where all APIs share a check, its message names the field as most have it."""
    if error.field is not None and (theirs := _THEIR_FIELDS.get(error.field)) is not None:
        error.message = error.message.replace(f"{error.field}:", f"{theirs}:", 1)
        error.field = theirs
    return error


class AnswerMessages:
    """The messages of one answer, in order: `score_prompt` comes first, if the client asked for that."""

    def __init__(self, request: ValidRequest, asked: pb.ResponseOptions, eos_ids: frozenset[int]) -> None:
        self._asked = asked
        self._has_text = not asked.HasField("output_text") or asked.output_text
        self._eos_ids = eos_ids
        self._last: OutToken | None = None
        self._info: pb.PromptInfo | None = pb.PromptInfo(num_prompt_tokens=request.prompt_tokens)  # until it is sent
        if asked.prompt_token_ids:
            self._info.token_ids.extend(request.prompt)
        if asked.prompt_logprobs:
            _score(self._info, 0.0, 0, ())  # nothing comes before the first token

    def score_prompt(self, scores: Sequence[inference_pb2.TokenLogprobs]) -> None:
        if self._info is not None:
            for each in scores:
                _score(self._info, each.logprob, each.token_id, [(top.token_id, top.logprob) for top in each.top])

    def part(self, pieces: Sequence[TextPiece]) -> pb.GenerateResponse:
        message = self._message()
        outputs = message.outputs
        if self._has_text:
            outputs.text = "".join([piece.text for piece in pieces])
        for piece in pieces:
            for token in piece.tokens:
                self._add(outputs, token)
                self._last = token
        return message

    def end(self, final: Final, stop_string: str | None) -> pb.GenerateResponse:
        message = self._message()
        info = message.outputs.finish_info
        info.num_output_tokens = final.usage.completion_tokens
        info.num_cached_tokens = final.usage.cached_tokens
        info.finish_reason = pb.FinishInfo.STOP if final.reason is FinishReason.STOP else pb.FinishInfo.LENGTH
        if stop_string is not None:
            info.stop_string = stop_string
        elif (last := self._last) is not None and last.is_stop and final.reason is FinishReason.STOP:
            if last.token_id in self._eos_ids:
                info.eos_token_id = last.token_id
            else:
                info.stop_token_id = last.token_id
        return message

    def _message(self) -> pb.GenerateResponse:
        info, self._info = self._info, None
        return pb.GenerateResponse(prompt_info=info, outputs=pb.SequenceOutput())

    def _add(self, outputs: pb.SequenceOutput, token: OutToken) -> None:
        outputs.num_tokens += 1
        if self._asked.output_token_ids:
            outputs.token_ids.append(token.token_id)
        if token.logprob is not None:
            _score(outputs, token.logprob, token.token_id, [(each.token_id, each.logprob) for each in token.top])


def _score(
    scores: pb.SequenceOutput | pb.PromptInfo, logprob: float, token_id: int, top: Sequence[tuple[int, float]]
) -> None:
    """Adds a position, with the most likely tokens there, best first."""
    scores.logprobs.append(logprob)
    scores.ranks.append(next((rank for rank, (each, _) in enumerate(top, 1) if each == token_id), 0))
    candidates = scores.candidate_tokens.add()
    for rank, (each, its_logprob) in enumerate(top, 1):
        candidates.tokens.add(id=each, logprob=its_logprob, rank=rank)
