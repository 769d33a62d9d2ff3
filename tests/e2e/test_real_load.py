"""A small cluster of real processes under load: cancelled by the thousand, killed in mid-stream, and for hours."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.cli.admin_client import Admin
from cluster.testing.chaos import Chaos
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.soak]
SOAK = bool(os.environ.get("TANDEM_SOAK"))
VOCAB = 300
CANCELS, KILLS = (10_000, 100) if SOAK else (300, 2)
AT_ONCE = 12
REST_WITHIN_S = 5.0 if SOAK else 30.0  # here, other tests may have both cores
FOR_S, EACH_S = (8 * 3600.0, 10.0) if SOAK else (40.0, 0.5)
GROWTH_BYTES = 8 << 20 if SOAK else 16 << 20  # of one process once it is warm: 1 MB/h, or what 40 s can tell
SPARE_FILES = 8  # connections that come and go


@pytest.fixture
def chaos(cluster_with: Callable[..., Cluster], tmp_path: Path) -> tuple[Chaos, Cluster]:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    pools = {"prefill": {"workers": 1}, "decode": {"workers": 2}, "engine": {"kv_blocks": 400}}
    spec = {
        "models": [{"source": str(model), **pools}],
        "router": {"replicas": 2, "disaggregation": "always"},
        "control": {"backend": "subprocess"},
    }
    cluster = cluster_with(spec=spec)
    routers = [each["http"] for each in cluster.status()["routers"]]
    prompts = [random_prompt(40 + 30 * number, VOCAB, number) for number in range(12)]
    admin = Admin(f"127.0.0.1:{cluster.admin_port}")
    return Chaos(admin, routers, cluster.process.pid, "tiny", prompts, seed=1), cluster


@pytest.mark.acceptance(
    20, here="a real cluster: 300 cancelled, 2 kills in mid-stream", soak="10,000 cancelled, 100 kills in mid-stream"
)
async def test_cancelled_and_killed_requests_leave_nothing(chaos: tuple[Chaos, Cluster]) -> None:
    asking, cluster = chaos
    await asking.begin(streams=4)
    storm = asyncio.create_task(asking.cancel(CANCELS, AT_ONCE))
    killed = 0
    while killed < KILLS:
        killed += await asking.injure(("kill a rank", "kill a service")[killed % 2])
        await asyncio.sleep(0.5)  # until the death is seen
        await asking.healed(at_rest=False)
    await storm
    began_s = time.monotonic()
    await asking.end()
    rested_s = time.monotonic() - began_s
    history = asking.history
    print(len(history.entries), len(history.cancelled), history.retried, history.faults, history.failures(), rested_s)
    assert rested_s < REST_WITHIN_S
    assert len(history.cancelled) >= CANCELS
    assert history.wrong == 0
    assert history.miscounted == []
    assert history.failures() == []
    await asyncio.to_thread(cluster.note_descendants)
    await asyncio.to_thread(cluster.assert_conserved)


@pytest.mark.acceptance(33, here="a whole cluster, 40 s", soak="a whole cluster, 8 hours")
async def test_no_process_grows_under_load(chaos: tuple[Chaos, Cluster]) -> None:
    asking, cluster = chaos
    await asking.begin(streams=4)
    times: dict[int, list[float]] = defaultdict(list)
    rss_bytes: dict[int, list[float]] = defaultdict(list)
    files: dict[int, list[int]] = defaultdict(list)
    keeper = psutil.Process(cluster.process.pid)
    family = [keeper, *keeper.children(recursive=True)]
    names = {each.pid: " ".join(each.cmdline()[-4:]) for each in family}
    await asyncio.sleep(FOR_S / 4)  # caches and allocators fill
    until_s = time.monotonic() + FOR_S
    while (now_s := time.monotonic()) < until_s:
        for process in family:
            times[process.pid].append(now_s)
            rss_bytes[process.pid].append(process.memory_info().rss)
            files[process.pid].append(process.num_fds())
        await asyncio.sleep(EACH_S)
    await asking.end()
    for pid, name in names.items():
        slope, _ = statistics.linear_regression(times[pid], rss_bytes[pid])
        print(f"{slope * FOR_S / 1e6:7.2f} MB, {files[pid][0]:4} to {files[pid][-1]:4} files: {name}")
    for pid, name in names.items():
        slope, _ = statistics.linear_regression(times[pid], rss_bytes[pid])
        half = len(files[pid]) // 2
        assert slope * FOR_S < GROWTH_BYTES, name
        assert max(files[pid][half:]) <= max(files[pid][:half]) + SPARE_FILES, name
    assert {each.pid for each in keeper.children(recursive=True)} < names.keys()  # none was started again
    assert asking.history.failures() == []
    assert asking.history.wrong == 0
    assert asking.history.miscounted == []
    await asyncio.to_thread(cluster.assert_conserved)
