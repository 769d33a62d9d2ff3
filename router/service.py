"""What both edges call: models, admission of a raw request, readiness. The edges only translate."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.output import ResponseStream
from router.request import Message, RawRequest, ServingModel, ValidRequest, new_request_id
from tandem.config import Role
from tandem.errors import InputError, ModelNotFound, TandemError


@dataclass(frozen=True, slots=True)
class Submitted:
    request: ValidRequest
    model: ServingModel
    stream: ResponseStream


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
    ) -> None:
        self.cluster = cluster
        self.router_id = router_id
        self.models = models
        self.dispatcher = dispatcher
        self.metrics = metrics
        self._executor = executor

    def model(self, name: str, *, required: bool = True) -> ServingModel:
        """Raises ModelNotFound. An empty name means the only model, unless `required`."""
        if not name and not required and len(self.models) == 1:
            return next(iter(self.models.values()))
        found = self.models.get(name)
        if found is None:
            served = ", ".join(repr(each) for each in self.models)
            raise ModelNotFound(f"model: expected one of {served}, got {name!r}", field="model")
        return found

    async def submit(self, raw: RawRequest, *, model_required: bool = True) -> Submitted:
        """Raises InputError, OverloadedError, UnavailableError; what fails later comes out of the stream."""
        try:
            model = self.model(raw.model, required=model_required)
            request = await model.parse(
                raw,
                self._executor,
                max_model_tokens=self.dispatcher.fleet.max_model_tokens(model.name),
                request_id=new_request_id(),
            )
        except InputError as error:
            self.rejected(raw.model, error)
            raise
        return Submitted(request, model, self.dispatcher.submit(model, request))

    async def tokenize(self, model: str, prompt: str | tuple[Message, ...]) -> tuple[ServingModel, tuple[int, ...]]:
        """Raises ModelNotFound, InputError."""
        found = self.model(model, required=False)
        return found, await found.tokenize(prompt, self._executor)

    def rejected(self, model: str, error: TandemError) -> None:
        """Counts a request that an edge refused before it was submitted."""
        self.metrics.rejected(model, error.code)

    def model_ready(self, name: str) -> bool:
        return bool(self.dispatcher.fleet.ready(name, Role.DECODE))

    @property
    def ready(self) -> bool:
        """A request for at least one model could be served now."""
        return any(self.model_ready(name) for name in self.models)
