"""What the next controller must know: which workers and routers there are, and which changes were under way.

The keeper keeps it, and on Ray an actor. After a change it is written again, whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from cluster.spec.changes import SHOWN_FIELDS, SpecSource, changed_fields, decides_nothing, is_live
from cluster.tasks import count_failure
from tandem.config.frozen import Frozen
from tandem.config.launch import RouterLaunch
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.version import works_with

log = logging.getLogger(__name__)

RETRY_S = 0.5


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


class WorkerRecord(Frozen):
    """One worker. `info`: the `WorkerInfo` with which its epoch registered, as serialized bytes in hexadecimal; empty:
    it has not. `devices`: of its ranks, reserved also after it was given up; empty: CPUs, or the backend knows them."""

    worker_id: str
    model: str
    role: Role
    epoch: int
    restarts: int
    state: WorkerState
    reason: str
    was_ever_ready: bool
    info: str = ""
    devices: tuple[str, ...] = ()


class RouterRecord(Frozen):
    launch: RouterLaunch
    restarts: int
    has_served: bool


class AdapterRecord(Frozen):
    """One that is served, as it was checked when it was applied."""

    model: str
    name: str
    folder: str
    fingerprint: str
    rank: int


class RouterSecrets(Frozen):
    """`controller` grants access to routers' traces, `salt` is of the tenants' cache salts. Routers that join get the
    same from every controller."""

    controller: str = Field(repr=False)
    salt: str = Field(repr=False)


class ScaleRecord(Frozen):
    """A change of a model's pools to these sizes."""

    model: str
    prefill: int
    decode: int


class DrainRecord(Frozen):
    """A drain of a worker in this epoch."""

    worker_id: str
    epoch: int
    restart: bool
    move: bool


class RestartRecord(Frozen):
    """A restart of routers and workers, one after another. `epochs`: by worker, in their order, when it began: a worker
    in another epoch has been restarted. `routers`: likewise, by router its number of restarts. `left`: of the workers,
    those that left the cluster before their turn."""

    restart_id: str
    epochs: dict[str, int]
    move: bool
    routers: dict[str, int] = Field(default_factory=dict)
    restarted: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    is_over: bool = False
    failure: str = ""


class ClusterRecord(Frozen):
    """`holder`: the keeper whose controller wrote it. `spec` and `flags`: what `tandem apply` compares with
    (`cluster.spec.changes.SpecSource`). `fingerprints`: of the models. `admin_address`: where workers and routers look
    for a controller. `restart`: the last one, under way or over."""

    holder: str
    version: str
    fingerprints: tuple[str, ...]
    spec: ClusterSpec
    flags: dict[str, Any]
    admin_address: str
    workers: tuple[WorkerRecord, ...]
    routers: tuple[RouterRecord, ...]
    under_way: tuple[ScaleRecord | DrainRecord, ...] = ()
    restart: RestartRecord | None = None
    secrets: RouterSecrets | None = None  # None: an earlier release wrote it, whose routers have them
    routers_before: ClusterSpec | None = None  # if routers are changing to the settings of `spec`: what they had
    joined_routers: tuple[str, ...] = ()
    adapters: tuple[AdapterRecord, ...] = ()

    def router_secrets(self) -> RouterSecrets | None:
        launches = (router.launch for router in self.routers)
        found = (
            RouterSecrets(controller=each.controller_secret, salt=each.salt_secret)
            for each in launches
            if each.controller_secret and each.salt_secret
        )
        return self.secrets or next(found, None)


@dataclass(frozen=True, slots=True)
class Successor:
    """What a controller is asked to run. `holder`: its keeper."""

    holder: str
    version: str
    fingerprints: tuple[str, ...]
    source: SpecSource

    def refusal(self, record: ClusterRecord) -> str:
        """Why it cannot take over what the record tells, which then has to be stopped; empty if it can."""
        if not works_with(self.version, record.version):
            return (
                f"it runs Tandem {record.version}, and this is {self.version}: to keep it serving, upgrade one minor "
                "version at a time"
            )
        if record.holder == self.holder:
            return ""
        if record.fingerprints != self.fingerprints:
            return "its models have changed"
        old, new = record.spec, self.source.spec
        fixed = [each for each in changed_fields(old, new) if not is_live(each)]
        changed = [each for each in fixed if not decides_nothing(each, old, new)]
        return f"{', '.join(changed[:SHOWN_FIELDS])} changed" if changed else ""

    def adapted(self, record: ClusterRecord) -> ClusterRecord:
        """The record with the changes to make: another `tandem up` may have been given other pool sizes."""
        if record.holder == self.holder:
            return record
        scales = [
            ScaleRecord(model=new.served_name, prefill=new.prefill.workers, decode=new.decode.workers)
            for old, new in zip(record.spec.models, self.source.spec.models, strict=True)
            if (old.prefill.workers, old.decode.workers) != (new.prefill.workers, new.decode.workers)
        ]
        old, new = record.spec, self.source.spec
        has_changed = old.of_routers != new.of_routers
        update = {"spec": new, "flags": dict(self.source.flags)}
        update["routers_before"] = record.routers_before or (old if has_changed else None)
        return record.model_copy(update=update | {"under_way": (*record.under_way, *scales)})


class RecordWriter:
    """Writes what `build` returns. `touch` asks for it, `write` returns when it is written. Both do nothing before
    `start`."""

    def __init__(self, build: Callable[[], ClusterRecord], keep: Callable[[str], Awaitable[None]]) -> None:
        self._build = build
        self._keep = keep
        self._touched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self.touch()

    def touch(self) -> None:
        self._touched.set()

    async def write(self) -> None:
        """Raises what `keep` raises: then nothing should be changed that the record does not tell."""
        if self._task is not None:
            await self._keep(self._build().model_dump_json())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._touched.wait()
            self._touched.clear()
            try:
                await self.write()
            except Exception:
                count_failure("record", "cannot keep the record of this cluster; trying again")
                self._touched.set()
                await asyncio.sleep(RETRY_S)
