"""Adapters that change while a cluster serves: workers load them first, then routers serve them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.control.directory import Directory
from cluster.control.model_adapters import ModelAdapters
from cluster.control.record import AdapterRecord, WorkerState
from cluster.spec.resolve import ResolvedModel
from router.testing.stub_worker import until
from tandem.config.model import ModelSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import CheckpointError, ConfigError, UnavailableError
from tandem.testing.adapters import write_adapter
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, worker_pb2

ENGINE = {"kind": "vllm", "block_tokens": 32}


class OneWorker:
    """Of one model; its worker loads what a test says."""

    def __init__(self, model: ResolvedModel) -> None:
        self.models = (model,)
        self.directory = Directory()
        self.state_now = worker_pb2.WorkerState()
        self.slot = SimpleNamespace(worker_id="decode-0", model=model, state=WorkerState.READY, epoch=1)
        self.slots = {"decode-0": self.slot}

    def model(self, name: str) -> ResolvedModel:
        return self.models[0]

    async def state(self, slot: object) -> worker_pb2.WorkerState:
        return self.state_now

    def loads(self) -> None:
        self.state_now.adapters.fingerprints[:] = [each.fingerprint for each in self.directory.listed_adapters()]

    def served(self) -> list[str]:
        return [each.name for each in self.directory.listed_adapters() if each.served]


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_dir = write_tiny_llama(folder / "tiny")
        for name, seed in (("sql", 1), ("chat", 2)):
            self.write(name, seed)
        self.workers = OneWorker(ResolvedModel.load(self.model("sql"), self.model_dir, "f"))
        self.adapters = ModelAdapters(cast(Any, self.workers), 5.0)

    def write(self, name: str, seed: int, **options: Any) -> None:
        write_adapter(self.folder / name, self.model_dir, seed=seed, **options)

    def model(self, *names: str, **engine: Any) -> ModelSpec:
        adapters = [{"name": name, "source": str(self.folder / name)} for name in names]
        return ModelSpec.model_validate(
            {"source": str(self.model_dir), "engine": ENGINE | engine, "adapters": adapters}
        )

    def spec(self, *names: str) -> ClusterSpec:
        return ClusterSpec(models=(self.model(*names),))

    async def apply(self, *names: str) -> list[str]:
        """What changed, in words."""
        changed = await self.adapters.changed(self.spec(*names))
        words = [self.adapters.words(model, wanted) for model, wanted in changed.items()]
        for model, wanted in changed.items():
            await self.adapters.change(model, wanted)
        return words


@pytest.fixture
async def site(tmp_path: Path) -> Site:
    """It serves `sql`."""
    site = Site(tmp_path)
    await site.adapters.start(site.spec("sql"))
    return site


async def test_workers_load_an_adapter_before_routers_serve_it(site: Site) -> None:
    assert site.workers.served() == ["sql"]
    applying = asyncio.create_task(site.apply("sql", "chat"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    assert site.workers.served() == ["sql"]
    assert not applying.done()
    site.workers.loads()
    assert await applying == ["tiny: adapters: chat added"]
    assert site.workers.served() == ["sql", "chat"]
    assert await site.apply("sql", "chat") == []


async def test_other_content_under_the_same_name_replaces_an_adapter(site: Site) -> None:
    (before,) = site.workers.directory.adapters("tiny")
    site.write("sql", 7)
    applying = asyncio.create_task(site.apply("sql"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    assert site.workers.directory.adapters("tiny") == (before,)
    site.workers.loads()
    assert await applying == ["tiny: adapters: sql replaced"]
    (after,) = site.workers.directory.adapters("tiny")
    assert (after.name, after.fingerprint != before.fingerprint) == ("sql", True)


async def test_removed_ones_need_no_wait(site: Site) -> None:
    assert await site.apply() == ["tiny: adapters: sql removed"]
    assert not site.workers.directory.listed_adapters()


async def test_one_that_a_worker_cannot_load_changes_nothing(site: Site) -> None:
    applying = asyncio.create_task(site.apply("sql", "chat"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    (chat,) = (each for each in site.workers.directory.listed_adapters() if not each.served)
    site.workers.loads()
    site.workers.state_now.adapters.fingerprints.remove(chat.fingerprint)
    site.workers.state_now.failed_adapters[chat.fingerprint] = "no such module"
    with pytest.raises(ConfigError, match="adapters: chat: decode-0 cannot load it: no such module"):
        await applying
    assert [each.name for each in site.workers.directory.listed_adapters()] == ["sql"]


async def test_workers_that_do_not_load_in_time_change_nothing(site: Site) -> None:
    impatient = ModelAdapters(cast(Any, site.workers), 0.3)
    changed = await impatient.changed(site.spec("chat"))
    with pytest.raises(UnavailableError, match=r"tiny: not loaded within 0.3 s \(control.start_timeout_s\)"):
        await impatient.change("tiny", changed["tiny"])
    assert site.workers.served() == ["sql"]


async def test_a_start_waits_for_the_adapters_of_its_workers(site: Site) -> None:
    assert await site.adapters.pending() == "adapters of decode-0"
    site.workers.loads()
    assert await site.adapters.pending() == ""


async def test_what_does_not_fit_is_refused_before_anything_changes(site: Site) -> None:
    site.write("wide", 3, rank=64)
    with pytest.raises(CheckpointError, match="adapters: wide: expected a rank of at most 16, got 64"):
        await site.apply("sql", "wide")
    assert site.workers.served() == ["sql"]


async def test_workers_that_started_without_room_for_adapters_take_none(site: Site) -> None:
    plain = OneWorker(ResolvedModel.load(site.model(), site.model_dir, "f"))
    with pytest.raises(ConfigError, match=r"started without room for any: .* engine.vllm.enable_lora: true"):
        await ModelAdapters(cast(Any, plain), 5.0).changed(site.spec("sql"))
    ready = OneWorker(ResolvedModel.load(site.model(vllm={"enable_lora": True}), site.model_dir, "f"))
    assert list(await ModelAdapters(cast(Any, ready), 5.0).changed(site.spec("sql"))) == ["tiny"]


async def test_a_controller_that_takes_over_serves_what_was_served_whatever_became_of_its_files(site: Site) -> None:
    applying = asyncio.create_task(site.apply("sql", "chat"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    site.workers.loads()
    await applying
    before, records = site.workers.directory.adapters("tiny"), site.adapters.records()
    (site.folder / "chat" / "adapter_model.safetensors").unlink()
    site.write("sql", 8)
    next_workers = OneWorker(site.workers.models[0])
    following = ModelAdapters(cast(Any, next_workers), 5.0)
    following.resume([AdapterRecord.model_validate_json(each.model_dump_json()) for each in records])
    assert next_workers.directory.adapters("tiny") == before
    with pytest.raises(CheckpointError, match=r"adapters: chat: .*expected this file"):
        await following.changed(site.spec("sql", "chat"))


async def test_the_order_of_adapters_is_no_change(site: Site) -> None:
    applying = asyncio.create_task(site.apply("sql", "chat"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    site.workers.loads()
    await applying
    assert await site.apply("chat", "sql") == []


@pytest.mark.parametrize("change", [{"epoch": 2}, {"state": WorkerState.RESTARTING}])
async def test_a_worker_that_ends_while_it_loads_changes_nothing(site: Site, change: dict[str, Any]) -> None:
    applying = asyncio.create_task(site.apply("chat"))
    await until(lambda: len(site.workers.directory.listed_adapters()) == 2)
    for name, value in change.items():
        setattr(site.workers.slot, name, value)
    with pytest.raises(UnavailableError, match="tiny: decode-0 ended while loading them"):
        await applying
    assert site.workers.served() == ["sql"]


async def test_without_a_ready_worker_nothing_is_added(site: Site) -> None:
    site.workers.slot.state = WorkerState.RESTARTING
    with pytest.raises(UnavailableError, match="tiny: expected a ready worker that loads them"):
        await site.apply("chat")
    assert site.workers.served() == ["sql"]


async def test_followers_of_the_directory_get_adapters_with_every_change(site: Site) -> None:
    followed = site.workers.directory.follow(takes_changes=True)
    assert [each.name for each in (await anext(followed)).adapters] == ["sql"]
    site.workers.directory.put_place(cluster_pb2.WorkerPlace(worker_id="decode-0"))
    changes = await anext(followed)
    assert changes.base_version
    assert [each.name for each in changes.adapters] == ["sql"]
