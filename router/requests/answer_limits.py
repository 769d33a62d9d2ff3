"""What the answers to one call may hold together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from router.requests.raw_request import RawRequest, ValidRequest
from tandem.errors import InputError
from tandem.text.words import plural

MAX_CALL_LOGPROBS = 1 << 20  # about 60 MB of JSON
LEAST_OPEN_TOKENS = 1024  # an answer without max_tokens is not cut shorter than this because of its logprobs
MAX_CALL_PREDICTED = 1 << 20  # characters or tokens of predictions
MAX_CALL_ECHO_CHARS = 1 << 24  # of prompts that are repeated in their answers


def check_answers(requests: Sequence[ValidRequest], choices: int) -> None:
    """Checks what the answers may hold together. Raises InputError."""
    scores = choices * sum(map(max_logprobs, requests))
    echoed = choices * sum(len(request.echo or "") for request in requests)
    asked = f"from {plural(len(requests), 'prompt')} with {plural(choices, 'choice')} each"
    if scores > MAX_CALL_LOGPROBS:
        raise InputError(
            f"logprobs: expected at most {MAX_CALL_LOGPROBS} in all answers together, got {scores} {asked}: lower n, "
            "logprobs or max_tokens (absent: the rest of the context), or send fewer or shorter prompts",
            field="logprobs",
        )
    if echoed > MAX_CALL_ECHO_CHARS:
        raise InputError(
            f"echo: expected at most {MAX_CALL_ECHO_CHARS} characters in all answers together, got {echoed} {asked}: "
            "lower n, leave echo out, or send fewer or shorter prompts",
            field="echo",
        )


def check_predictions(raws: Sequence[RawRequest], total: int) -> None:
    """Each answer has its own copy on its way to a worker. Raises InputError."""
    size = max((len(raw.prediction) for raw in raws if raw.prediction is not None), default=0)
    if total > 1 and size * total > MAX_CALL_PREDICTED:
        raise InputError(
            f"prediction: expected at most {MAX_CALL_PREDICTED} characters or tokens for all answers together, got "
            f"{size} for each of {total}: shorten it, or ask for fewer answers at a time",
            field="prediction",
        )


def fit_logprobs(requests: Sequence[ValidRequest], raws: Sequence[RawRequest], choices: int) -> list[ValidRequest]:
    """Lowers the `max_tokens` of answers with logprobs whose client left it out, so that all fit MAX_CALL_LOGPROBS.
    Changes nothing if less than LEAST_OPEN_TOKENS would be left for each: that is refused instead."""
    is_open = [raw.sampling.max_tokens is None for raw in raws]

    def lowered(most: int) -> list[ValidRequest]:
        return [_lowered(each, most) if open_ else each for each, open_ in zip(requests, is_open, strict=True)]

    shortest = sum(map(max_logprobs, lowered(1)))
    per_token = sum(map(max_logprobs, lowered(2))) - shortest  # of all open answers, one token longer
    if not per_token or (most := 1 + (MAX_CALL_LOGPROBS // choices - shortest) // per_token) < LEAST_OPEN_TOKENS:
        return list(requests)
    return lowered(most)


def _lowered(request: ValidRequest, max_tokens: int) -> ValidRequest:
    if request.sampling.logprobs is None or request.sampling.max_tokens <= max_tokens:
        return request
    return structs.replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def max_logprobs(request: ValidRequest) -> int:
    """The most that one answer may hold: of its prompt and of its tokens."""
    sampling = request.sampling
    prompt = 0 if sampling.prompt_logprobs is None else (1 + sampling.prompt_logprobs) * request.prompt_tokens
    return prompt + (0 if sampling.logprobs is None else (1 + sampling.logprobs) * sampling.max_tokens)
