"""A model is ready once a canary has passed since its decode workers appeared. Readiness probes send no canaries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from router.observe.metrics.health import CanaryPurpose, CanaryResult, HealthMetrics
from router.probes.canary import Canary
from router.workers.fleet import Fleet
from tandem.clock import Clock
from tandem.config.model import Role

log = logging.getLogger(__name__)

CANARY_TIMEOUT_S = 10.0
RETRY_S = 1.0


class Readiness:
    """Calls `on_change` when a canary has made a model ready."""

    def __init__(
        self, fleet: Fleet, models: Iterable[str], metrics: HealthMetrics, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._models = tuple(models)
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._passed: set[str] = set()
        self._running: dict[str, Canary] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._tries: dict[str, int] = {}  # canaries sent since the model's workers appeared
        self._closed = False

    def is_ready(self, model: str) -> bool:
        return model in self._passed and bool(self._fleet.ready(model, Role.DECODE))

    def update(self) -> None:
        """Call this when the fleet has changed."""
        if self._closed:
            return
        for model in self._models:
            if not self._fleet.ready(model, Role.DECODE):
                self._passed.discard(model)
                self._tries.pop(model, None)
            elif model not in self._passed and model not in self._running and self._retry is None:
                self._send(model)

    def close(self) -> None:
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        for canary in list(self._running.values()):
            canary.cancel()

    def _send(self, model: str) -> None:
        """Tries a handoff if possible, then local prefill, then the next workers."""
        pair, is_local = divmod(self._tries.get(model, 0), 2)
        decodes = self._fleet.ready(model, Role.DECODE)
        decode = decodes[pair % len(decodes)]
        prefills = [each for each in self._fleet.ready(model, Role.PREFILL) if each.reaches(decode)]
        prefill = prefills[pair % len(prefills)] if prefills and not is_local else None
        self._tries[model] = self._tries.get(model, 0) + 1
        canary = Canary(model, self._fleet, self._clock, CANARY_TIMEOUT_S, lambda result: self._ended(model, result))
        self._running[model] = canary
        canary.start(decode, prefill)

    def _ended(self, model: str, result: CanaryResult) -> None:
        del self._running[model]
        self._metrics.canary(CanaryPurpose.READINESS, result)
        if self._closed:
            return
        if result is CanaryResult.PASSED:
            self._passed.add(model)
            self._on_change()
        elif self._retry is None:
            log.warning("readiness canary failed", extra={"model": model, "result": result.value})
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.update()
