"""Which GPU each rank gets, with and without Ray, on GPUs that are not there.

The processes are recorders, so nothing touches CUDA: what is tested is the launch that each process of a rank gets.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.backends.subprocess_backend import SubprocessBackend
from cluster.control.record import WorkerRecord, WorkerState
from cluster.control.worker_slot import EpochSettings
from cluster.control.workers import Workers
from cluster.keeper.keeper import Keeper
from cluster.spec.resolve import ResolvedCluster, resolve_models
from cluster.testing.recorder import RecordingBackend
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.testing.models import write_tiny_llama

UUIDS = "GPU-a,GPU-b,GPU-c"


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., ResolvedCluster]:
    source = str(write_tiny_llama(tmp_path / "tiny", heads=4, kv_heads=2))

    def make(devices: tuple[int, ...], **model: Any) -> ResolvedCluster:
        tree = {"source": source, "engine": {"device": "cuda"}} | model
        spec = ClusterSpec.model_validate({"models": [tree], "control": {"backend": "subprocess"}})
        return ResolvedCluster(spec, resolve_models(spec, lambda what: None, fetch=False), devices)

    return make


class Running:
    """Workers of recorders, without Ray."""

    def __init__(self, cluster: ResolvedCluster, folder: Path) -> None:
        self.records = folder / "records"
        self.records.mkdir()
        backend = SubprocessBackend(Keeper(folder / "logs"), cluster.devices)
        self.workers = Workers(cluster, RecordingBackend(backend, self.records), None)
        self._settings = EpochSettings(cluster.spec, "127.0.0.1:1", None, folder / "run")

    async def __aenter__(self) -> Running:
        await self.workers.start(self._settings)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.workers.close()

    async def devices(self, count: int) -> dict[str, str]:
        """Of each process, once `count` have started."""
        async with asyncio.timeout(60):
            while len(found := sorted(self.records.glob("*.json"))) < count:
                await asyncio.sleep(0.02)
        return {each.stem: json.loads(each.read_text())["device"] for each in found}


async def test_ranks_get_different_gpus(resolved: Callable[..., ResolvedCluster], tmp_path: Path) -> None:
    cluster = resolved((0, 1, 2), decode={"tp": 2})
    async with Running(cluster, tmp_path) as running:
        assert await running.devices(3) == {
            "prefill-0.rank-0": "cuda:0",
            "decode-0.rank-0": "cuda:1",
            "decode-0.rank-1": "cuda:2",
        }


async def test_both_roles_share_one_gpu(resolved: Callable[..., ResolvedCluster], tmp_path: Path) -> None:
    cluster = resolved((0,), engine={"device": "cuda", "device_share": 0.45})
    async with Running(cluster, tmp_path) as running:
        assert set((await running.devices(2)).values()) == {"cuda:0"}


async def test_wide_workers_of_both_roles_share_two_gpus(
    resolved: Callable[..., ResolvedCluster], tmp_path: Path
) -> None:
    cluster = resolved((0, 1), engine={"device": "cuda", "device_share": 0.45}, prefill={"tp": 2}, decode={"tp": 2})
    async with Running(cluster, tmp_path) as running:
        found = await running.devices(4)
    for worker in ("prefill-0", "decode-0"):
        assert [found[f"{worker}.rank-{rank}"] for rank in (0, 1)] == ["cuda:0", "cuda:1"]


async def test_each_role_has_the_device_of_its_own_engine(
    resolved: Callable[..., ResolvedCluster], tmp_path: Path
) -> None:
    roles = {"prefill": {"engine": {"device": "cuda:3"}}, "decode": {"engine": {"device": "cpu"}}}
    async with Running(resolved((1, 3), **roles), tmp_path) as running:
        assert await running.devices(2) == {"prefill-0.rank-0": "cuda:3", "decode-0.rank-0": "cpu"}


async def test_a_restarted_worker_keeps_its_gpu_and_a_removed_one_leaves_it_to_others(
    resolved: Callable[..., ResolvedCluster], tmp_path: Path
) -> None:
    cluster = resolved((0, 1))
    async with Running(cluster, tmp_path) as running:
        before = await running.devices(2)
        workers = running.workers
        for record in running.records.iterdir():
            record.unlink()
        (rank, *_) = [each for each in await workers.slots["prefill-0"].processes() if each.name == "rank-0"]
        os.kill(rank.pid, 9)
        again = await running.devices(1)
        assert again == {name: device for name, device in before.items() if name.startswith("prefill-0")}
        with pytest.raises(ConfigError, match=r"engine\.device: decode-1 needs a share of 1 GPU"):
            await workers.add("decode-1", Role.DECODE, workers.model(""))
        await workers.remove("decode-0")
        await workers.add("decode-1", Role.DECODE, workers.model(""))
        assert (await running.devices(2))["decode-1.rank-0"] == before["decode-0.rank-0"]


@pytest.mark.parametrize("first", [WorkerState.RESTARTING, WorkerState.FAILED], ids=["crashed", "given-up"])
async def test_after_a_takeover_every_worker_has_the_gpu_it_had(
    resolved: Callable[..., ResolvedCluster], tmp_path: Path, first: WorkerState
) -> None:
    """The record lists first the worker that does not run: it must not be given what a later one has."""
    cluster, keeper = resolved((0, 1)), Keeper(tmp_path / "logs")
    settings = EpochSettings(cluster.spec, "127.0.0.1:1", None, tmp_path / "run")
    before = Workers(cluster, SubprocessBackend(keeper, (0, 1)), None)
    await before.start(settings)
    records = {each.worker_id: each for each in before.records()}
    await before.close()
    assert {name: each.devices for name, each in records.items()} == {
        "prefill-0": ("cuda:0",),
        "decode-0": ("cuda:1",),
    }
    ended = records["decode-0"].model_copy(update={"state": first, "was_ever_ready": True})
    kept = [WorkerRecord.model_validate_json(each.model_dump_json()) for each in (ended, records["prefill-0"])]
    backend = SubprocessBackend(keeper, (0, 1))
    after = Workers(cluster, backend, None)
    after.resume(settings, kept)
    try:
        assert {each.worker_id: each.devices for each in after.records()} == {
            each.worker_id: each.devices for each in records.values()
        }
        with pytest.raises(ConfigError, match=r"decode-1 needs a share of 1 GPU .*cuda:0: 0, cuda:1: 0"):
            await after.add("decode-1", Role.DECODE, after.model(""))
    finally:
        await after.close()


RAY_SCRIPT = textwrap.dedent(
    """
    import asyncio, json, os, pathlib, sys
    from cluster.backends.ray_env import prepare_local_ray
    devices = json.loads(sys.argv[2])
    prepare_local_ray(None, devices)
    from cluster.backends.ray_backend import LocalRay, RayBackend
    from cluster.control.worker_slot import EpochSettings
    from cluster.control.workers import Workers
    from cluster.spec.resolve import ResolvedCluster, resolve_models
    from cluster.keeper.keeper import Keeper
    from cluster.testing.recorder import RecordingBackend
    from tandem.config.spec import ClusterSpec

    async def main(folder):
        tree = json.loads(sys.argv[3])
        spec = ClusterSpec.model_validate({"models": [tree]})
        cluster = ResolvedCluster(spec, resolve_models(spec, lambda what: None, fetch=False))
        records = folder / "records"
        records.mkdir()
        where = LocalRay(folder / "ray", 1, int(sys.argv[4]))
        inner = RayBackend("c", "k", folder / "logs", Keeper(folder / "logs"), where, 60.0)
        backend = RecordingBackend(inner, records)
        workers = Workers(cluster, backend, None)
        await backend.open()
        try:
            await workers.start(EpochSettings(spec, "127.0.0.1:1", None, folder / "run"))
            ranks = sum(pool.workers * pool.tp for pool in (spec.models[0].prefill, spec.models[0].decode))
            async with asyncio.timeout(90):
                while len(found := list(records.glob("*.json"))) < ranks:
                    await asyncio.sleep(0.05)
            print(json.dumps({each.stem: json.loads(each.read_text()) for each in found}))
        finally:
            await workers.close()
            await backend.close()

    asyncio.run(main(pathlib.Path(sys.argv[1])))
    """
)


def under_ray(
    model: dict[str, Any],
    *,
    gpus: int,
    visible: str | None = None,
    devices: list[int] | None = None,
) -> dict[str, dict[str, str | None]]:
    """What each rank got. Ray reads its token at import and keeps it, hence the process."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))  # Ray's socket paths leave no room for pytest's
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_"))}
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    try:
        command = [
            sys.executable,
            "-c",
            RAY_SCRIPT,
            str(folder),
            json.dumps(devices),
            json.dumps(model),
            str(gpus),
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        found: dict[str, dict[str, str | None]] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(write_tiny_llama(tmp_path / "tiny", heads=4, kv_heads=2))


@pytest.mark.slow
def test_ray_gives_ranks_different_gpus_and_shows_them_all(tiny: str) -> None:
    model = {"source": tiny, "engine": {"device": "cuda"}, "decode": {"tp": 2}}
    found = under_ray(model, gpus=3, visible=UUIDS)
    assert {each["device"] for each in found.values()} == {"cuda:0", "cuda:1", "cuda:2"}
    assert {each["visible"] for each in found.values()} == {UUIDS}


@pytest.mark.slow
def test_under_ray_both_roles_share_one_gpu_of_those_that_the_spec_names(tiny: str) -> None:
    model = {"source": tiny, "engine": {"device": "cuda", "device_share": 0.45}}
    found = under_ray(model, gpus=1, visible=UUIDS, devices=[2])
    assert {(each["device"], each["visible"]) for each in found.values()} == {("cuda:0", "GPU-c")}


@pytest.mark.slow
def test_without_a_list_of_visible_gpus_rays_numbers_are_the_ordinals(tiny: str) -> None:
    found = under_ray({"source": tiny, "engine": {"device": "cuda"}}, gpus=2)
    ranks = {each["device"] for name, each in found.items() if ".rank-" in name}
    assert ranks == {"cuda:0", "cuda:1"}
    assert {each["visible"] for each in found.values()} == {None}


@pytest.mark.slow
def test_under_ray_a_cpu_role_beside_a_gpu_role_gets_no_gpu(tiny: str) -> None:
    model = {"source": tiny, "engine": {"device": "cuda"}, "prefill": {"engine": {"device": "cpu"}}}
    found = under_ray(model, gpus=1)
    assert (found["prefill-0.rank-0"]["device"], found["decode-0.rank-0"]["device"]) == ("cpu", "cuda:0")
