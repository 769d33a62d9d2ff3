"""The models that clients may name, with their adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.auth.call import Call
from router.probes.readiness import Readiness
from router.requests.image_expansion import ImageExpander
from router.requests.serving_model import ServingModel
from tandem.errors import ModelNotFound
from tandem.v1 import cluster_pb2

SHOWN_MODELS, SHOWN_CHARS = 10, 100  # by an error


class ServedModels:
    def __init__(self, models: Mapping[str, ServingModel], readiness: Readiness, images: ImageExpander) -> None:
        self.by_name = models  # with their adapters
        self._bases = models
        self._readiness = readiness
        self._images = images

    def set_adapters(self, adapters: Iterable[cluster_pb2.ModelAdapter]) -> None:
        """Serves these, as models of their own names."""
        made = {
            each.name: base.with_adapter(each.name, each.fingerprint)
            for each in adapters
            if each.served and (base := self._bases.get(each.model)) is not None
        }
        self.by_name = {**self._bases, **{name: model for name, model in made.items() if name not in self._bases}}

    def usable_by(self, call: Call | None) -> Mapping[str, ServingModel]:
        """Those that the caller may use. Answers never mention others."""
        if call is None or call.principal.models is None:
            return self.by_name
        return {name: model for name, model in self.by_name.items() if call.principal.may_use(name)}

    def find(self, name: str, call: Call | None = None, *, required: bool = True) -> ServingModel:
        """Raises ModelNotFound. An empty name means the only model, without an adapter, unless `required`."""
        models = self.usable_by(call)
        if not name and not required:
            bases = [each for each in models.values() if not each.adapter]
            if len(bases) == 1:
                return bases[0]
        found = models.get(name)
        if found is None:
            names = [repr(each) for each in models]
            served = ", ".join(names[:SHOWN_MODELS]) or "none"
            if len(names) > SHOWN_MODELS:
                served += f" and {len(names) - SHOWN_MODELS} more"
            raise ModelNotFound(f"model: expected one of {served}, got {name[:SHOWN_CHARS]!r}", field="model")
        return found

    def check_tokens(self, name: str, count: int, call: Call | None = None, *, field: str = "prompt") -> None:
        """Checks the number of token ids before any is parsed. Raises ModelNotFound, ContextExceeded."""
        self.find(name, call, required=False).check_tokens(field, count)

    def base_name(self, name: str) -> str:
        """Of an adapter, its model's; else the name itself, also of none that is served."""
        found = self.by_name.get(name)
        return name if found is None else found.base

    def parent(self, model: ServingModel, call: Call | None) -> str | None:
        """Of an adapter, its model's name, if the caller may use that."""
        may_use = call is None or call.principal.may_use(model.base)
        return model.base if model.adapter and may_use else None

    def input_modalities(self, model: ServingModel) -> list[str]:
        """Of its engines that are known at present."""
        return ["text", "image"] if self._images.taken_by(model.base) else ["text"]

    def is_ready(self, name: str) -> bool:
        """Of an adapter's name: whether its model is ready."""
        model = self.by_name.get(name)
        return model is not None and self._readiness.is_ready(model.base)

    @property
    def any_ready(self) -> bool:
        return any(map(self.is_ready, self._bases))
