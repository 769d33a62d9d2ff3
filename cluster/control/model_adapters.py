"""The LoRA adapters of each model, from its spec to its workers: changed while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cluster.control.record import AdapterRecord, WorkerState
from cluster.control.worker_slot import WorkerSlot
from cluster.control.workers import Workers
from cluster.spec.resolve import load_adapters
from tandem.checkpoint.adapter import Adapter
from tandem.config.model import ModelSpec, Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, UnavailableError
from tandem.rpc.identity import WorkerEpoch

POLL_S = 0.1


async def has_loaded(workers: Workers, slot: WorkerSlot, adapters: Sequence[Adapter]) -> bool:
    """Raises ConfigError for an adapter that the worker cannot load."""
    if not adapters:
        return True
    if (state := await workers.state(slot)) is None:
        return False
    for each in adapters:
        if (why := state.failed_adapters.get(each.fingerprint)) is not None:
            raise ConfigError(f"adapters: {each.name}: {slot.worker_id} cannot load it: {why}", field="adapters")
    return {each.fingerprint for each in adapters} <= set(state.adapters.fingerprints)


class ModelAdapters:
    """The directory has them: routers serve what it says, and workers load it."""

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s

    async def start(self, spec: ClusterSpec) -> None:
        """Those of a new cluster. Raises ConfigError for what cannot be served."""
        for model, adapters in (await self.changed(spec)).items():
            self._workers.directory.set_adapters(model, adapters)

    def resume(self, records: Sequence[AdapterRecord]) -> None:
        """Those that an earlier controller served, whose files may have changed or gone: workers have them."""
        for model in {each.model for each in records}:
            served = [
                Adapter(each.name, Path(each.folder), each.fingerprint, each.rank)
                for each in records
                if each.model == model
            ]
            self._workers.directory.set_adapters(model, served)

    def records(self) -> tuple[AdapterRecord, ...]:
        return tuple(
            AdapterRecord(
                model=model.spec.served_name,
                name=each.name,
                folder=str(each.folder),
                fingerprint=each.fingerprint,
                rank=each.rank,
            )
            for model in self._workers.models
            for each in self._workers.directory.adapters(model.spec.served_name)
        )

    async def changed(self, spec: ClusterSpec) -> dict[str, tuple[Adapter, ...]]:
        """The adapters of each model that has others now, by content. Raises ConfigError for what cannot be served."""
        loaded = {each.served_name: await asyncio.to_thread(self._load, each) for each in spec.models}
        served = self._workers.directory.adapters
        return {model: new for model, new in loaded.items() if set(new) != set(served(model))}

    def words(self, model: str, wanted: tuple[Adapter, ...]) -> str:
        """What a change to `wanted` does."""
        old = {each.name: each.fingerprint for each in self._workers.directory.adapters(model)}
        new = {each.name: each.fingerprint for each in wanted}
        kinds = {
            "added": [name for name in new if name not in old],
            "replaced": [name for name in new if name in old and new[name] != old[name]],
            "removed": [name for name in old if name not in new],
        }
        said = [f"{', '.join(names)} {kind}" for kind, names in kinds.items() if names]
        return f"{model}: adapters: {'; '.join(said) or 'in another folder'}"

    async def change(self, model: str, adapters: tuple[Adapter, ...]) -> None:
        """Returns when every ready worker of the model has loaded them and routers serve them, which keep the earlier
        ones until then. Raises ConfigError if a worker cannot load one, UnavailableError if it takes too long, or if a
        worker ends meanwhile: the earlier ones stay."""
        directory = self._workers.directory
        before = directory.adapters(model)
        ready = self._ready_epochs(model)
        if adapters and not ready:
            raise UnavailableError(f"adapters: {model}: expected a ready worker that loads them; try again later")
        directory.set_adapters(model, before, loading=adapters)
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._pending(model, adapters) or ready - self._ready_epochs(model):
                    if lost := ready - self._ready_epochs(model):
                        names = ", ".join(sorted(worker_id for worker_id, _ in lost))
                        raise UnavailableError(f"adapters: {model}: {names} ended while loading them", field="adapters")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UnavailableError(
                f"adapters: {model}: not loaded within {self._timeout_s:g} s (control.start_timeout_s)",
                field="adapters",
            ) from None
        else:
            before = adapters
        finally:
            directory.set_adapters(model, before)

    def _ready_epochs(self, model: str) -> set[WorkerEpoch]:
        slots = [slot for slot in self._workers.slots.values() if slot.model.spec.served_name == model]
        return {(slot.worker_id, slot.epoch) for slot in slots if slot.state is WorkerState.READY}

    async def pending(self) -> str:
        """Names a ready worker that has not loaded its model's adapters; empty if all have. Raises ConfigError for one
        that a worker cannot load."""
        for model in self._workers.models:
            name = model.spec.served_name
            if pending := await self._pending(name, self._workers.directory.adapters(name)):
                return pending
        return ""

    async def _pending(self, model: str, wanted: tuple[Adapter, ...]) -> str:
        slots = [slot for slot in self._workers.slots.values() if slot.model.spec.served_name == model]
        for slot in slots:
            if slot.state is WorkerState.READY and not await has_loaded(self._workers, slot, wanted):
                return f"adapters of {slot.worker_id}"
        return ""

    def _load(self, spec: ModelSpec) -> tuple[Adapter, ...]:
        """Workers keep what they could load when they started."""
        started = self._workers.model(spec.served_name)
        if spec.adapters and not all(started.spec.takes_adapters(role) for role in Role):
            raise ConfigError(
                f"adapters: {spec.served_name}: its workers started without room for any: start the cluster again, or "
                "first with engine.vllm.enable_lora: true and then add adapters while it serves",
                field="adapters",
            )
        return load_adapters(spec, started.config)
