"""The router's API for all edges: submission of raw requests, tokens, readiness. Edges only translate protocols."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from msgspec import structs

from router.admission.parse_threads import PARSER_THREADS, ParseThreads
from router.auth.call import Call
from router.auth.call_gate import CallGate
from router.auth.principal import ANONYMOUS
from router.observe.metrics.requests import RouterMetrics
from router.request_ids import new_request_id
from router.request_terms import RequestTerms, TermsParser
from router.requests.answer_limits import check_answers, check_predictions, fit_logprobs
from router.requests.answers import Answers, SubmittedRequest
from router.requests.dispatcher import Dispatcher
from router.requests.image_expansion import ImageExpander
from router.requests.raw_request import CHARS_PER_TOKEN_OFTEN, Prompt, RawRequest, ValidRequest, prompt_chars, renamed
from router.requests.serving_model import ServingModel
from router.served_models import ServedModels
from router.texts.chat import Chat
from tandem.errors import (
    DeadlineExceeded,
    InputError,
    InternalError,
    OverloadedError,
    RateLimited,
    RequestQuarantined,
    TandemError,
    UnavailableError,
)
from tandem.images import ExpandedPrompt

SLICE_TOKENS = 16_384  # submitted at a time: about 1 ms; then others have the event loop for as long
REQUEST_TOKENS = 4096  # a request costs as much as to copy a prompt of this length
BIAS_TOKENS = 8  # likewise for an entry of logit_bias
BYTES_PER_TOKEN = 64  # likewise of an image
IMAGE_TOKENS = 256  # that one often has, before it is known
PART_TOKENS = 4096  # of a part: what a busy worker takes a few seconds for
PART_WAIT_S = 60.0  # without a deadline, for room in the queue
PART_RETRY_S = 0.1
Parsed = tuple[ServingModel, ValidRequest]


class RouterService:
    def __init__(
        self,
        *,
        cluster: str,
        router_id: str,
        models: ServedModels,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        executor: Executor,
        terms: TermsParser,
        calls: CallGate,
        images: ImageExpander,
    ) -> None:
        self.cluster = cluster
        self.router_id = router_id
        self.models = models
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.executor = executor
        self.threads = ParseThreads(executor, PARSER_THREADS)
        self.calls = calls
        self._images = images
        self.is_leaving = False  # it still serves, but no more clients should come
        self._terms = terms

    def terms(
        self, header: Callable[[str], str | None], remaining_s: float | None = None, call: Call | None = None
    ) -> RequestTerms:
        """Parses the terms of a request, and counts it against its key's limit if `take_keyed_request` has not. Call on
        arrival: deadlines count from here.

        Raises as TermsParser.parse does, and RateLimited.
        """
        with self.rejections_of("", TandemError):
            terms = self._terms.parse(header, remaining_s, call)
            if call is not None and not call.is_counted:
                call.take_request()
            return terms

    async def submit(
        self, raw: RawRequest, terms: RequestTerms | None = None, *, model_required: bool = True
    ) -> SubmittedRequest:
        """Parses and queues one request. Later failures are raised by the stream.

        Raises InputError, OverloadedError, UnavailableError, DeadlineExceeded, RateLimited.
        """
        with self._held_images([raw], 1, terms):
            model, request = await self._parse(raw, terms, model_required, new_request_id())
            with self._charged([(model, request)], terms) as submitted:
                stream = self.dispatcher.submit(model, request, terms)
                submitted.append(request)
        return SubmittedRequest(request, model, stream)

    async def submit_all(
        self, raws: Sequence[RawRequest], choices: int, request_id: str, terms: RequestTerms | None = None
    ) -> Answers:
        """Submits `choices` requests for each of `raws`; if one is refused, the others are cancelled. Raises as
        `submit`. Many are submitted in slices, between which other requests have as much time.

        Choice i samples with the request's seed + i, so choice 0 equals the answer to a request with one choice. Only
        choice 0 gets the prompt's logprobs.
        """
        with self.rejections_of(raws[0].model):
            check_predictions(raws, len(raws) * choices)
        with self._held_images(raws, choices, terms):
            parsed = await self._parse_all(raws, request_id, terms)
            requests = fit_logprobs([request for _, request in parsed], raws, choices)
            parsed = [(model, request) for (model, _), request in zip(parsed, requests, strict=True)]
            with self.rejections_of(requests[0].model):
                check_answers(requests, choices)
            with self._charged(parsed, terms) as submitted:
                answers = await self._submit_parsed(parsed, choices, request_id, terms)
                submitted += requests
            return answers

    @contextmanager
    def _held_images(self, raws: Sequence[RawRequest], choices: int, terms: RequestTerms | None) -> Iterator[None]:
        """Until they are submitted. Raises InputError, OverloadedError."""
        images = [each for raw in raws for each in _images_of(raw.prompt)]
        with ExitStack() as held:
            if images:
                with self.rejections_of(raws[0].model, OverloadedError):
                    tenant = "" if terms is None else terms.tenant
                    held.enter_context(self._images.held(tenant, images, choices))
            yield

    async def submit_in_parts(
        self,
        raws: Sequence[RawRequest],
        fields: Sequence[str],
        most: int,
        request_id: str,
        terms: RequestTerms,
    ) -> AsyncGenerator[Answers]:
        """As `submit_all`, at most `most` or PART_TOKENS at a time: the next ones are submitted when the caller asks
        for them. All are parsed and checked before. `fields`: of the prompts, for errors. A part for which the queue
        has no room waits for it, unless it is the first."""
        parsed = await self._parse_all(raws, request_id, terms, fields)
        end_s = terms.deadline_s or time.monotonic() + PART_WAIT_S
        parts = _parts(parsed, most)
        with self._charged(parsed, terms) as submitted:
            for number, part in enumerate(parts):
                part_id = request_id if len(parts) == 1 else f"{request_id}-part{number}"
                while True:
                    try:
                        answers = await self._submit_parsed(part, 1, part_id, terms)
                        break
                    except OverloadedError as error:
                        if not number or time.monotonic() > end_s:
                            raise
                        delay_s = error.retry_after_s or 0.0
                    await asyncio.sleep(min(max(delay_s, PART_RETRY_S), 1.0))
                submitted += [request for _, request in part]
                yield answers

    async def _parse_all(
        self, raws: Sequence[RawRequest], request_id: str, terms: RequestTerms | None, fields: Sequence[str] = ()
    ) -> list[Parsed]:
        parsed: list[Parsed] = []
        for number, raw in enumerate(raws):
            if number:
                await asyncio.sleep(0)  # a short prompt is parsed on the event loop; many take long
            try:
                parsed.append(await self._parse(raw, terms, model_required=True, request_id=request_id))
            except InputError as error:
                raise (renamed(error, fields[number]) if fields else error) from None
        return parsed

    async def _submit_parsed(
        self,
        parsed: Sequence[Parsed],
        choices: int,
        request_id: str,
        terms: RequestTerms | None,
    ) -> Answers:
        total = len(parsed) * choices
        submitted: list[SubmittedRequest] = []
        slice_tokens, began_s = 0, time.monotonic()
        try:
            for number in range(total):
                model, first = parsed[number // choices]
                own_id = request_id if total == 1 else f"{request_id}-{number}"
                request = first if own_id == first.request_id else _choice(first, number % choices, own_id)
                if slice_tokens and slice_tokens + _submit_tokens(request) > SLICE_TOKENS:
                    slice_tokens = 0
                    await asyncio.sleep(time.monotonic() - began_s)
                    began_s = time.monotonic()
                slice_tokens += _submit_tokens(request)
                submitted.append(SubmittedRequest(request, model, self.dispatcher.submit(model, request, terms)))
        except BaseException:  # also the cancellation of this task
            for each in submitted:
                each.stream.cancel()
            raise
        return Answers(request_id, submitted, choices)

    async def _parse(
        self, raw: RawRequest, terms: RequestTerms | None, model_required: bool, request_id: str
    ) -> tuple[ServingModel, ValidRequest]:
        with self.rejections_of(
            raw.model,
            DeadlineExceeded,
            InternalError,
            OverloadedError,
            RateLimited,
            RequestQuarantined,
            UnavailableError,
        ):
            call = None if terms is None else terms.call
            model = self.models.find(raw.model, call, required=model_required)
            if call is not None:
                call.request_id = request_id
                call.name_model(model.name)
            if _images_of(raw.prompt):
                self._images.check(model.base)
            limit = self.dispatcher.fleet.max_model_tokens(model.base)
            salt = self.calls.salts.salt(_authenticated_tenant(call), raw.cache_salt)
            tenant, deadline_s = ("", None) if terms is None else (terms.tenant, terms.deadline_s)
            return model, await model.parse(
                raw,
                self.threads,
                tenant=tenant,
                max_model_tokens=limit,
                request_id=request_id,
                cache_salt=salt,
                expand=partial(self._expanded, model, call, tenant, salt, deadline_s),
            )

    async def _expanded(
        self,
        model: ServingModel,
        call: Call | None,
        tenant: str,
        salt: bytes,
        deadline_s: float | None,
        prompt: Sequence[int],
        images: Sequence[bytes],
    ) -> ExpandedPrompt:
        """Counts IMAGE_TOKENS for each image before a worker reads them, until the whole prompt can be counted. They
        stay counted if a worker read in vain. Raises as `ImageExpander.expand`, and RateLimited."""
        expand = partial(self._images.expand, model.base, tenant, salt, deadline_s, prompt, images)
        if call is None:
            return await expand()
        spent = estimate = IMAGE_TOKENS * len(images)
        call.check_prompt(estimate)
        call.add_prompt(model.name, estimate)
        try:
            expanded = await expand()
            spent = 0
            return expanded
        except (OverloadedError, RequestQuarantined, UnavailableError):  # no worker read them
            spent = 0
            raise
        finally:
            call.add_prompt(model.name, spent - estimate)

    @contextmanager
    def _charged(self, parsed: Sequence[Parsed], terms: RequestTerms | None) -> Iterator[list[ValidRequest]]:
        """Checks the caller's token rate and at once counts the prompts, which may be submitted much later than other
        calls are checked. Then gives back those that are not in the list. A prompt counts once for all its choices: one
        of them computes it. Raises RateLimited."""
        submitted: list[ValidRequest] = []
        if terms is None or terms.call is None:
            yield submitted
            return
        name, tokens = parsed[0][0].name, _prompt_tokens([request for _, request in parsed])
        with self.rejections_of(name, RateLimited):
            terms.call.check_prompt(tokens)
        terms.call.add_prompt(name, tokens)
        try:
            yield submitted
        finally:
            terms.call.add_prompt(name, _prompt_tokens(submitted) - tokens)

    async def tokenize(
        self, model: str, prompt: str | Chat, call: Call | None = None, *, special_tokens: bool = True
    ) -> tuple[ServingModel, tuple[int, ...]]:
        """Bills an estimate before it tokenizes, and then the difference.

        Raises ModelNotFound, InputError, RateLimited.
        """
        estimate = prompt_chars(prompt) // CHARS_PER_TOKEN_OFTEN
        found = self._bill_tokens(model, estimate, call)
        images, tenant = _images_of(prompt), _tenant_of(call)
        if images:
            self._images.check(found.base)
        with self._images.held(tenant, images):
            tokens = await found.tokenize(prompt, self.threads, tenant, special_tokens=special_tokens)
            if images:
                salt = self.calls.salts.salt(_authenticated_tenant(call), "")
                tokens = (await self._expanded(found, call, tenant, salt, None, tokens, images)).tokens
        if call is not None:
            call.add_prompt(found.name, len(tokens) - estimate)
        return found, tokens

    async def detokenize(self, model: str, tokens: Sequence[int], call: Call | None = None) -> str:
        """The text of token ids, special tokens included. Raises ModelNotFound, InputError, RateLimited."""
        found = self._bill_tokens(model, len(tokens), call)
        return await found.detokenize(tokens, self.threads, _tenant_of(call))

    def take_request(self, call: Call | None) -> None:
        """Counts a call that submits no request against its key's limit. Call on arrival. Raises RateLimited."""
        if call is not None:
            call.take_request()

    def take_keyed_request(self, call: Call | None) -> None:
        """Counts a call with an idempotency key, also a repeat, against its key's limit. Call on arrival. Raises
        RateLimited."""
        if call is not None:
            with self.rejections_of("", RateLimited):
                call.take_request()
            call.is_counted = True

    def _bill_tokens(self, name: str, tokens: int, call: Call | None) -> ServingModel:
        """The model of a call that submits no request. Raises ModelNotFound, RateLimited."""
        model = self.models.find(name, call, required=False)
        if call is not None:
            call.check_prompt(tokens)
            call.add_prompt(model.name, tokens)
        return model

    def rejected(self, model: str, error: TandemError) -> None:
        """Counts a request that an edge refused before submission; that of an adapter for its model."""
        self.metrics.rejected(self.models.base_name(model), error.code)

    @contextmanager
    def rejections_of(self, model: str, *others: type[TandemError]) -> Iterator[None]:
        """Counts a request that an InputError or one of the `others` refuses."""
        counted: tuple[type[TandemError], ...] = (InputError, *others)
        try:
            yield
        except counted as error:
            self.rejected(model, error)
            raise

    @property
    def ready(self) -> bool:
        """Whether at least one model passed a canary and the router is neither leaving nor draining."""
        if self.is_leaving or self.dispatcher.draining:
            return False
        return self.models.any_ready


def _parts(parsed: Sequence[Parsed], most: int) -> list[list[Parsed]]:
    """In order, of at most `most` requests and, but for a single one, PART_TOKENS tokens each."""
    parts: list[list[Parsed]] = [[]]
    tokens = 0
    for each in parsed:
        tokens += each[1].prompt_tokens
        if parts[-1] and (len(parts[-1]) == most or tokens > PART_TOKENS):
            parts.append([])
            tokens = each[1].prompt_tokens
        parts[-1].append(each)
    return parts


def _images_of(prompt: Prompt) -> tuple[bytes, ...]:
    return prompt.images if isinstance(prompt, Chat) else ()


def _prompt_tokens(requests: Sequence[ValidRequest]) -> int:
    return sum(request.prompt_tokens for request in requests)


def _submit_tokens(request: ValidRequest) -> int:
    """What a submission costs the event loop, in tokens of a prompt to copy."""
    copied = request.prompt_tokens + len(request.prediction or ())
    copied += sum(len(each.data) for each in request.images) // BYTES_PER_TOKEN
    return REQUEST_TOKENS + copied + BIAS_TOKENS * len(request.sampling.logit_bias)


def _tenant_of(call: Call | None) -> str:
    return "" if call is None else call.tenant


def _authenticated_tenant(call: Call | None) -> str:
    """Empty for a tenant that is only claimed: it has no salt, as anyone who claims it could share its blocks."""
    return "" if call is None or call.principal is ANONYMOUS else call.tenant


def _choice(request: ValidRequest, number: int, request_id: str) -> ValidRequest:
    sampling = replace(request.sampling, seed=(request.sampling.seed + number) % 2**64)
    if number:
        sampling = replace(sampling, prompt_logprobs=None)
    return structs.replace(request, request_id=request_id, sampling=sampling)
