"""The workers of a cluster without processes: placing, registration, role changes, removal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.backends.protocol import ANYWHERE, MemberHandle, Resources, Where
from cluster.control import worker_slot
from cluster.control.record import WorkerState
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.worker_slot import EpochSettings
from cluster.control.workers import Workers
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from cluster.spec.resolve import ResolvedCluster, resolve_models
from tandem.config.model import Colocate, ModelSpec, Role
from tandem.config.spec import ClusterSpec, ControlSpec
from tandem.errors import ConfigError, IncompatiblePools, IncompatibleVersions, UnavailableError
from tandem.rpc.versions import Versions
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2


class IdleMember:
    """Starts nothing and never ends."""

    def __init__(self) -> None:
        self.starts = 0
        self.stops = 0
        self.started: MemberStart | None = None

    async def start(self, start: MemberStart) -> None:
        self.starts += 1
        self.started = start

    async def wait_end(self) -> MemberEnd:
        await asyncio.Event().wait()
        return MemberEnd(reason="")

    async def running(self) -> RunningMember | None:
        return None if self.started is None else RunningMember(start=self.started, device="cpu")

    async def stop(self) -> None:
        self.stops += 1
        self.started = None


@dataclass
class FakeBackend:
    name: str = "fake"
    placed: dict[str, list[IdleMember]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    where: dict[str, Where] = field(default_factory=dict)
    node_groups: dict[str, str] = field(default_factory=dict)
    full: bool = False
    record: str = ""
    slow: dict[str, asyncio.Event] = field(default_factory=dict)  # groups whose place has to be waited for

    async def open(self) -> None: ...

    async def wait_lost(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def is_held(self) -> bool:
        return True

    async def keep(self, record: str) -> None:
        self.record = record

    async def kept(self) -> str:
        return self.record

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None: ...

    def hold(self, group: str, devices: Sequence[str], each: Resources) -> None: ...

    def devices(self, group: str) -> tuple[str, ...]:
        return ()

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        self.where[group] = where
        if group in self.placed:
            return list(self.placed[group])
        if group in self.slow:
            await self.slow[group].wait()
        if self.full:
            raise ConfigError(f"{group}: no room")
        self.placed[group] = [IdleMember() for _ in members]
        return list(self.placed[group])

    async def place_local(self, name: str) -> MemberHandle:
        return IdleMember()

    async def release(self, group: str) -> None:
        self.released.append(group)

    async def node_group(self, group: str) -> str:
        return self.node_groups.get(group, "")

    async def draining(self) -> frozenset[str]:
        return frozenset()

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def workers(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Workers]:
    source = str(write_tiny_llama(tmp_path / "tiny"))
    spec = ClusterSpec.model_validate({"models": [{"source": source, "decode": {"workers": 2}}]})
    cluster = ResolvedCluster(spec, resolve_models(spec, lambda what: None, fetch=False))
    workers = Workers(cluster, backend, None)
    await workers.start(EpochSettings(spec, "127.0.0.1:1", None, tmp_path / "run"))
    yield workers
    await workers.close()


def info(workers: Workers, worker_id: str, dtype: str = "float32") -> cluster_pb2.WorkerInfo:
    slot = workers.slots[worker_id]
    found = cluster_pb2.WorkerInfo(worker_id=worker_id, epoch=slot.epoch, model=slot.model.spec.served_name)
    found.layout.tp, found.layout.kv_heads, found.layout.dtype = 1, 2, dtype
    return found


def resolved(folder: Path, **model: Any) -> ResolvedCluster:
    source = str(write_tiny_llama(folder / "tiny"))
    tree = {"models": [{"source": source} | model], "control": {"ray_address": "127.0.0.1:1"}}
    spec = ClusterSpec.model_validate(tree)
    return ResolvedCluster(spec, resolve_models(spec, lambda what: None, fetch=False))


async def test_a_worker_is_placed_with_all_that_share_its_machine_in_mind(tmp_path: Path) -> None:
    pools = {"prefill": {"workers": 2, "tp": 2, "node_groups": ["a", "b"]}, "decode": {"node_groups": ["b"]}}
    cluster, backend = resolved(tmp_path, **pools, colocate="require"), FakeBackend()
    workers = Workers(cluster, backend, None)
    await workers.start(EpochSettings(cluster.spec, "127.0.0.1:1", None, tmp_path / "run"))
    rank = Resources(cpus=1.0)
    assert backend.where["prefill-0"] == Where(("a", "b"), Colocate.REQUIRE, ("prefill-1",), ("decode-0",), (rank,))
    assert {*backend.where["decode-0"].partners} == {"prefill-0", "prefill-1"}
    assert replace(backend.where["decode-0"], partners=()) == Where(("b",), Colocate.REQUIRE, (), (), (rank, rank))
    await workers.close()


async def test_a_role_change_takes_a_worker_whose_node_allows_both(tmp_path: Path) -> None:
    pools = {"prefill": {"workers": 2, "node_groups": ["a", "b"]}, "decode": {"node_groups": ["b"]}}
    cluster, backend = resolved(tmp_path, **pools), FakeBackend(node_groups={"prefill-0": "b", "prefill-1": "a"})
    workers = Workers(cluster, backend, None)
    await workers.start(EpochSettings(cluster.spec, "127.0.0.1:1", None, tmp_path / "run"))
    scaler = PoolScaler(workers, ControlSpec(), poll_s=0.01)
    assert await scaler.scale("", 1, 2) == ("prefill-0 becomes a decode worker",)
    await workers.close()


async def test_a_model_with_batches_gets_no_prefill_worker(tmp_path: Path) -> None:
    cluster, backend = resolved(tmp_path, prefill={"workers": 0}, engine={"batching": "static"}), FakeBackend()
    workers = Workers(cluster, backend, None)
    await workers.start(EpochSettings(cluster.spec, "127.0.0.1:1", None, tmp_path / "run"))
    scaler = PoolScaler(workers, ControlSpec(), poll_s=0.01)
    with pytest.raises(ConfigError, match=r"engine\.batching: expected continuous with prefill workers, got static"):
        await scaler.scale("", 1, 1)
    assert scaler.sizes("") == (0, 1)
    await workers.close()


async def test_every_worker_of_the_spec_is_placed_and_none_is_ready_yet(workers: Workers, backend: FakeBackend) -> None:
    assert set(backend.placed) == {"prefill-0", "decode-0", "decode-1"}
    directory = workers.directory.snapshot()
    assert {place.worker_id for place in directory.places} == set(backend.placed)
    assert not directory.workers
    assert await workers.pending() == "workers prefill-0, decode-0, decode-1"


async def test_a_registered_worker_is_ready_and_announced(workers: Workers) -> None:
    announced: list[str] = []
    workers.announce = announced.append
    workers.register(info(workers, "decode-1"))
    assert workers.slots["decode-1"].state is WorkerState.READY
    assert workers.directory.get("decode-1") is not None
    assert announced == ["decode-1 is ready"]
    assert await workers.pending() == "workers prefill-0, decode-0"


async def test_another_epoch_cannot_register(workers: Workers) -> None:
    stale = info(workers, "decode-1")
    stale.epoch += 1
    with pytest.raises(ConfigError, match="decode-1 in epoch"):
        workers.register(stale)
    assert workers.directory.get("decode-1") is None


@pytest.mark.parametrize(("controller", "worker"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 1))])
async def test_a_worker_of_the_release_before_or_after_registers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, controller: tuple[int, int], worker: tuple[int, int]
) -> None:
    monkeypatch.setattr("cluster.control.workers.CONTROL_VERSIONS", Versions(*controller))
    workers.register(info(workers, "decode-1"), Versions(*worker))
    assert workers.slots["decode-1"].state is WorkerState.READY


async def test_a_worker_two_releases_older_is_given_up_with_both_versions(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.control.workers.CONTROL_VERSIONS", Versions(3, 2))
    with pytest.raises(IncompatibleVersions, match=r"controller supports versions 2 to 3, decode-1 1 to 1: update dec"):
        workers.register(info(workers, "decode-1"), Versions(1, 1))
    assert workers.slots["decode-1"].is_given_up


async def test_an_incompatible_worker_is_given_up_with_the_reason(workers: Workers) -> None:
    workers.register(info(workers, "decode-0"))
    with pytest.raises(IncompatiblePools):
        workers.register(info(workers, "decode-1", dtype="bfloat16"))
    assert workers.slots["decode-1"].is_given_up
    assert len(workers.slots_of(workers.model(""))) == 2
    with pytest.raises(ConfigError, match=r"decode-1 cannot start: .*bfloat16"):
        await workers.pending()


async def test_a_role_change_reaches_the_directory_and_stops_nothing(workers: Workers, backend: FakeBackend) -> None:
    workers.register(info(workers, "decode-1"))
    epoch = workers.slots["decode-1"].epoch
    workers.change_role("decode-1", Role.PREFILL)
    registered = workers.directory.get("decode-1")
    assert registered is not None
    assert registered.role == cluster_pb2.ROLE_PREFILL
    assert (workers.slots["decode-1"].epoch, backend.placed["decode-1"][0].stops) == (epoch, 0)


async def test_a_removed_worker_is_stopped_and_its_place_released(workers: Workers, backend: FakeBackend) -> None:
    workers.register(info(workers, "decode-1"))
    await workers.remove("decode-1")
    assert set(workers.slots) == {"prefill-0", "decode-0"}
    assert {place.worker_id for place in workers.directory.snapshot().places} == {"prefill-0", "decode-0"}
    assert workers.directory.get("decode-1") is None
    assert backend.released == ["decode-1"]
    assert backend.placed["decode-1"][0].stops > 0


async def test_a_removal_goes_on_without_its_caller_and_its_id_waits_for_it(
    workers: Workers, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, release = asyncio.Event(), backend.release

    async def slow(group: str) -> None:
        await stopped.wait()
        await release(group)

    monkeypatch.setattr(backend, "release", slow)
    removing = asyncio.create_task(workers.remove("decode-1"))
    await asyncio.sleep(0.01)
    removing.cancel()
    await asyncio.gather(removing, return_exceptions=True)
    adding = asyncio.create_task(workers.add("decode-1", Role.DECODE, workers.model("")))
    await asyncio.sleep(0.01)
    assert not adding.done()
    assert not backend.released
    stopped.set()
    await adding
    assert backend.released == ["decode-1"]
    assert "decode-1" in workers.slots


async def test_a_worker_without_room_leaves_nothing_behind(workers: Workers, backend: FakeBackend) -> None:
    backend.full = True
    with pytest.raises(ConfigError, match="no room"):
        await workers.add("decode-2", Role.DECODE, workers.model(""))
    assert "decode-2" not in workers.slots
    assert len(workers.directory.snapshot().places) == 3


async def test_a_worker_without_a_place_does_not_keep_others_from_being_taken_over(
    workers: Workers, backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ray, when a node was lost together with the controller."""
    monkeypatch.setattr(worker_slot, "MAX_BACKOFF_S", 0.01)
    for worker_id in ("prefill-0", "decode-0", "decode-1"):
        workers.register(info(workers, worker_id))
    (running,) = backend.placed["decode-0"]
    async with asyncio.timeout(60):
        while not running.starts:
            await asyncio.sleep(0.005)
    slow = {"decode-1": asyncio.Event(), "prefill-0": asyncio.Event()}
    later = FakeBackend(full=True, slow=slow, placed={"decode-0": [running]})
    after = Workers(ResolvedCluster(workers._spec, workers.models), later, None)
    after.resume(EpochSettings(workers._spec, "127.0.0.1:1", None, tmp_path / "run"), workers.records())
    try:
        listed = {each.worker_id for each in after.directory.snapshot().workers}
        assert listed == {"prefill-0", "decode-0", "decode-1"}, "at once: routers drop what the directory lacks"
        slow["decode-1"].set()
        missing = after.slots["decode-1"]
        async with asyncio.timeout(60):
            while missing.state is not WorkerState.RESTARTING:
                await asyncio.sleep(0.005)
        assert missing.reason == "its epoch could not be run: decode-1: no room"
        assert {each.worker_id for each in after.directory.snapshot().workers} == {"prefill-0", "decode-0"}
        later.full = False
        async with asyncio.timeout(60):
            while not later.placed.get("decode-1") or not later.placed["decode-1"][0].starts:
                await asyncio.sleep(0.005)
        assert (running.starts, running.stops) == (1, 0)
    finally:
        await after.close()


async def test_an_unknown_model_is_answered_with_the_served_names(workers: Workers) -> None:
    with pytest.raises(ConfigError, match=r"model: expected one of tiny, got 'other'"):
        workers.model("other")


async def test_a_worker_that_was_given_up_can_be_removed_and_its_id_is_not_given_again(
    workers: Workers, backend: FakeBackend
) -> None:
    workers.slots["decode-1"].refuse("5 starts in a row failed on its GPU")
    scaler = PoolScaler(workers, ControlSpec(start_timeout_s=0.05), poll_s=0.001)
    with pytest.raises(UnavailableError, match="decode-2 to be ready"):  # the fake backend starts nothing
        await scaler.scale("", None, 2)
    assert (backend.released, "decode-1" in workers.slots) == (["decode-2"], True)
    await scaler.drain("decode-1", restart=False, move=False)
    assert (backend.released, "decode-1" in workers.slots) == (["decode-2", "decode-1"], False)


async def test_pools_with_different_engines_start_and_stop_workers(
    workers: Workers, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same engine, `decode-1` would become a prefill worker and nothing would start."""
    model = workers.model("")
    spec = ModelSpec.model_validate(model.spec.model_dump() | {"prefill": {"engine": {"kv_blocks": 64}}})
    changed = replace(model, spec=spec)
    monkeypatch.setattr(workers, "_models", (changed,))
    for slot in workers.slots.values():
        slot.model = changed
    scaler = PoolScaler(workers, ControlSpec(start_timeout_s=0.05), poll_s=0.001)
    with pytest.raises(UnavailableError, match="prefill-1 to be ready"):
        await scaler.scale("", 2, 1)
    assert "prefill-1" in backend.placed
    assert workers.slots["decode-1"].role is Role.DECODE
