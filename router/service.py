"""What both edges call: models, admission of a raw request, readiness. The edges only translate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from router.answers import Answers, Submitted
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.readiness import Readiness
from router.request import Message, RawRequest, ServingModel, ValidRequest, new_request_id
from router.terms import Terms, TermsParser
from tandem.errors import InputError, ModelNotFound, TandemError


class RouterService:
    def __init__(
        self,
        *,
        cluster: str,
        router_id: str,
        models: Mapping[str, ServingModel],
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        executor: Executor,
        readiness: Readiness,
        terms: TermsParser,
    ) -> None:
        self.cluster = cluster
        self.router_id = router_id
        self.models = models
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.executor = executor
        self._readiness = readiness
        self._terms = terms

    def model(self, name: str, *, required: bool = True) -> ServingModel:
        """Raises ModelNotFound. An empty name means the only model, unless `required`."""
        if not name and not required and len(self.models) == 1:
            return next(iter(self.models.values()))
        found = self.models.get(name)
        if found is None:
            served = ", ".join(repr(each) for each in self.models)
            raise ModelNotFound(f"model: expected one of {served}, got {name!r}", field="model")
        return found

    def check_tokens(self, name: str, count: int) -> None:
        """Before `count` token ids are looked at. Raises ModelNotFound, ContextExceeded."""
        self.model(name, required=False).check_tokens("prompt", count)

    def terms(self, header: Callable[[str], str | None], remaining_s: float | None = None) -> Terms:
        """On what terms a request comes. To be asked when it arrives. Raises InputError as TermsParser.parse does."""
        try:
            return self._terms.parse(header, remaining_s)
        except InputError as error:
            self.rejected("", error)
            raise

    async def submit(
        self, raw: RawRequest, terms: Terms | None = None, *, model_required: bool = True
    ) -> Submitted:
        """Raises InputError, OverloadedError, UnavailableError, DeadlineExceeded; what fails later comes out of the
        stream."""
        model, request = await self._parse(raw, model_required)
        return Submitted(request, model, self.dispatcher.submit(model, request, terms))

    async def submit_all(
        self, raws: Sequence[RawRequest], choices: int, request_id: str, terms: Terms | None = None
    ) -> Answers:
        """`choices` answers for each of `raws`: all of them or, when one is refused, none. Raises as `submit`.

        Choice i draws with the request's seed + i, so the first is what it would be alone.
        """
        parsed = [await self._parse(raw, model_required=True) for raw in raws]
        total = len(parsed) * choices
        submitted: list[Submitted] = []
        try:
            for number in range(total):
                model, first = parsed[number // choices]
                request = _choice(first, number % choices, request_id if total == 1 else f"{request_id}-{number}")
                submitted.append(Submitted(request, model, self.dispatcher.submit(model, request, terms)))
        except TandemError:
            for each in submitted:
                each.stream.cancel()
            raise
        return Answers(request_id, submitted, choices)

    async def _parse(self, raw: RawRequest, model_required: bool) -> tuple[ServingModel, ValidRequest]:
        try:
            model = self.model(raw.model, required=model_required)
            limit = self.dispatcher.fleet.max_model_tokens(model.name)
            return model, await model.parse(
                raw, self.executor, max_model_tokens=limit, request_id=new_request_id()
            )
        except InputError as error:
            self.rejected(raw.model, error)
            raise

    async def tokenize(
        self, model: str, prompt: str | tuple[Message, ...], *, special_tokens: bool = True
    ) -> tuple[ServingModel, tuple[int, ...]]:
        """Raises ModelNotFound, InputError."""
        found = self.model(model, required=False)
        return found, await found.tokenize(prompt, self.executor, special_tokens=special_tokens)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        """The text of token ids, special ones too. Raises ModelNotFound, InputError."""
        found = self.model(model, required=False)
        return await found.detokenize(tokens, self.executor)

    def rejected(self, model: str, error: TandemError) -> None:
        """Counts a request that an edge refused before it was submitted."""
        self.metrics.rejected(model, error.code)

    def model_ready(self, name: str) -> bool:
        return self._readiness.is_ready(name)

    @property
    def ready(self) -> bool:
        """A request for at least one model could be served now: a canary was, and the router is not about to end."""
        return not self.dispatcher.draining and any(self.model_ready(name) for name in self.models)


def _choice(request: ValidRequest, number: int, request_id: str) -> ValidRequest:
    sampling = replace(request.sampling, seed=(request.sampling.seed + number) % 2**64)
    return replace(request, request_id=request_id, sampling=sampling)
