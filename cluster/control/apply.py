"""Makes a running cluster what a changed spec says, as far as that goes without a restart."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cluster.spec.changes import SpecSource
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from cluster.control.controller import Controller

log = logging.getLogger(__name__)

MOST_SPEC_BYTES = 256 << 10


class Apply:
    """`source` is what the cluster is asked to be now."""

    def __init__(self, controller: Controller, source: SpecSource) -> None:
        self._controller = controller
        self._source = source
        self._one_at_a_time = asyncio.Lock()

    async def apply(self, text: str, *, dry_run: bool) -> tuple[str, ...]:
        """Returns what was done (or would be), in words. While the autoscaler is on, only sizes that differ from what
        was asked for before are set: the others are where the traffic has brought them.

        Raises ConfigError before anything is changed; that of `LiveRatio.scale` where a model's pools cannot be so,
        with what was set before that.
        """
        if len(text.encode()) > MOST_SPEC_BYTES:
            raise ConfigError(f"FILE: expected at most {MOST_SPEC_BYTES} bytes of YAML", field="spec")
        async with self._one_at_a_time:
            return await self._apply(text, dry_run)

    async def _apply(self, text: str, dry_run: bool) -> tuple[str, ...]:
        before, after = self._source.spec, self._source.changed_by(text)
        sizes = self._sizes(before, after)
        done = [f"{name}: {prefill} prefill and {decode} decode workers" for name, prefill, decode in sizes]
        if after.autoscaler != before.autoscaler:
            done.append(f"autoscaler: {_changes(before.autoscaler, after.autoscaler)}")
        if dry_run:
            return tuple(f"would set {each}" for each in done)
        for number, (name, prefill, decode) in enumerate(sizes):
            log.info("apply: %s gets %d prefill and %d decode workers", name, prefill, decode)
            try:
                await self._controller.live_ratio.scale(name, prefill, decode)
            except TandemError as error:
                if number:
                    error.message += f" (set before that: {'; '.join(done[:number])})"
                raise
        self._source = SpecSource(after, self._source.flags)
        if after.autoscaler != before.autoscaler or sizes:
            await self._controller.start_autoscaling(after)
        return tuple(done)

    def _sizes(self, before: ClusterSpec, after: ClusterSpec) -> list[tuple[str, int, int]]:
        """Of the pools that are to be set, by model."""
        found = []
        for old, new in zip(before.models, after.models, strict=True):
            wanted = new.prefill.workers, new.decode.workers
            asked = (old.prefill.workers, old.decode.workers) != wanted
            there_are = self._controller.live_ratio.sizes(new.served_name)
            if wanted != there_are and (asked or not after.autoscaler.enabled):
                found.append((new.served_name, *wanted))
        return found


def _changes(before: AutoscalerSpec, after: AutoscalerSpec) -> str:
    old, new = before.model_dump(), after.model_dump()
    return ", ".join(f"{name} {new[name]}" for name in new if new[name] != old[name])
