"""Applies a changed spec to a running cluster: pool sizes, adapters, the autoscaler, the routers' settings and the log
level change without a restart of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, Protocol

from cluster.spec.changes import SpecSource, shown_changes
from tandem.checkpoint.adapter import Adapter
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, TandemError

log = logging.getLogger(__name__)

MAX_SPEC_BYTES = 256 << 10
ROUTER = "router."
LOG_LEVELS_OF: dict[Literal["controller", "router", "worker"], str] = {
    "controller": "the controller",
    "router": "the routers, one after another",
    "worker": "each worker when it next starts (tandem restart)",
}


class ScalablePools(Protocol):
    """Implemented by `PoolScaler`."""

    def sizes(self, model_name: str) -> tuple[int, int]: ...

    async def scale(self, model_name: str, prefill: int | None, decode: int | None) -> tuple[str, ...]: ...


class AutoscalerSettings(Protocol):
    """Implemented by `Autoscaling`."""

    async def configure(self, spec: ClusterSpec) -> None: ...


class RouterSettings(Protocol):
    """Implemented by `Routers`."""

    async def change(self, spec: ClusterSpec) -> None: ...


class Adapters(Protocol):
    """Implemented by `ModelAdapters`."""

    async def changed(self, spec: ClusterSpec) -> dict[str, tuple[Adapter, ...]]: ...

    def words(self, model: str, wanted: tuple[Adapter, ...]) -> str: ...

    async def change(self, model: str, adapters: tuple[Adapter, ...]) -> None: ...


class SpecApplier:
    """`source` is the spec that the cluster was last asked to have."""

    def __init__(
        self,
        pools: ScalablePools,
        autoscaling: AutoscalerSettings,
        routers: RouterSettings,
        adapters: Adapters,
        source: SpecSource,
        on_change: Callable[[], None] = lambda: None,
        set_log_levels: Callable[[ClusterSpec], None] = lambda spec: None,
    ) -> None:
        """`set_log_levels` sets the controller's, and that of workers that start."""
        self._pools = pools
        self._autoscaling = autoscaling
        self._routers = routers
        self._adapters = adapters
        self._on_change = on_change
        self._set_log_levels = set_log_levels
        self.source = source
        self._lock = asyncio.Lock()

    async def apply(self, text: str, *, dry_run: bool) -> tuple[str, ...]:
        """Returns one sentence for each change that was made, or would be. While an autoscaler is on, sets only sizes
        that differ from the previous spec: the autoscaler chose the others.

        Raises ConfigError before any change; if a later model's pools cannot have their sizes, raises the error of
        `PoolScaler.scale`, which then lists the changes that were made.
        """
        if len(text.encode()) > MAX_SPEC_BYTES:
            raise ConfigError(f"FILE: expected at most {MAX_SPEC_BYTES} bytes of YAML", field="spec")
        if dry_run:  # it need not wait for a change under way
            return await self._apply(text, dry_run)
        async with self._lock:
            return await self._apply(text, dry_run)

    async def resume(self, before: ClusterSpec) -> None:
        """Completes a change of routers' settings that an earlier controller began. `before`: the spec before it."""
        async with self._lock:
            try:
                await self._change_routers(before, self.source.spec)
            except TandemError as error:
                log.error("a change of routers' settings was not completed: %s", error.message)

    async def resume_adapters(self, spec: ClusterSpec) -> None:
        """Changes those that an earlier controller served to those of `spec`."""
        async with self._lock:
            try:
                for model, wanted in (await self._adapters.changed(spec)).items():
                    await self._adapters.change(model, wanted)
                    self._on_change()
            except TandemError as error:
                log.error("the earlier adapters are served: %s", error.message)

    async def _apply(self, text: str, dry_run: bool) -> tuple[str, ...]:
        before, after = self.source.spec, self.source.changed_by(text)
        adapters = await self._adapters.changed(after)
        sizes = self._changed_sizes(before, after)
        steps: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            (
                f"{name}: {prefill} prefill and {decode} decode workers",
                partial(self._pools.scale, name, prefill, decode),
            )
            for name, prefill, decode in sizes
        ]
        steps += [
            (self._adapters.words(model, wanted), partial(self._adapters.change, model, wanted))
            for model, wanted in adapters.items()
        ]
        changes = [words for words, _ in steps]
        if after.autoscaler != before.autoscaler:
            changes.append(f"autoscaler: {_changed_fields(before.autoscaler, after.autoscaler)}")
        if after.router != before.router:
            shown = [line.removeprefix(ROUTER) for line in shown_changes(before, after) if line.startswith(ROUTER)]
            changes.append(f"routers, one after another: {', '.join(shown)}")
        changes += [
            f"log level {after.log_level_of(part)}: {who}"
            for part, who in LOG_LEVELS_OF.items()
            if after.log_level_of(part) != before.log_level_of(part)
        ]
        if dry_run:
            earlier = ("an earlier change is still under way",) if self._lock.locked() else ()
            return (*earlier, *(f"would set {each}" for each in changes))
        for number, (words, make) in enumerate(steps):
            log.info("apply: %s", words)
            try:
                await make()
            except TandemError as error:
                if number:
                    error.message += f" (set before that: {'; '.join(changes[:number])})"
                raise
        self.source = SpecSource(after, self.source.flags)
        self._set_log_levels(after)
        self._on_change()
        if after.autoscaler != before.autoscaler or after.router != before.router or sizes:
            await self._autoscaling.configure(after)
        if after.of_routers != before.of_routers:
            await self._change_routers(before, after)
        return tuple(changes)

    async def _change_routers(self, before: ClusterSpec, after: ClusterSpec) -> None:
        """If they cannot serve with the new settings, they have the earlier ones again, and so has the spec, also if
        the caller leaves meanwhile."""
        changing = asyncio.create_task(self._changed_routers(before, after))
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:
            await asyncio.wait([changing])  # under the lock: its end may change the spec
            raise

    async def _changed_routers(self, before: ClusterSpec, after: ClusterSpec) -> None:
        try:
            await self._routers.change(after)
        except Exception as error:
            kept = {"router": before.router, "log_level": before.log_level, "log_levels": before.log_levels}
            self.source = SpecSource(after.model_copy(update=kept), self.source.flags)
            self._set_log_levels(before)
            self._on_change()
            await self._autoscaling.configure(self.source.spec)
            if isinstance(error, TandemError):
                error.message += "; the routers have their earlier settings again"
            raise

    def _changed_sizes(self, before: ClusterSpec, after: ClusterSpec) -> list[tuple[str, int, int]]:
        """(model, prefill workers, decode workers) for every model whose pools must change."""
        found = []
        for old, new in zip(before.models, after.models, strict=True):
            wanted = new.prefill.workers, new.decode.workers
            requested = (old.prefill.workers, old.decode.workers) != wanted
            if wanted != self._pools.sizes(new.served_name) and (requested or not after.autoscaler.owns_sizes):
                found.append((new.served_name, *wanted))
        return found


def _changed_fields(before: AutoscalerSpec, after: AutoscalerSpec) -> str:
    old, new = before.model_dump(), after.model_dump()
    return ", ".join(f"{name} {new[name]}" for name in new if new[name] != old[name])
