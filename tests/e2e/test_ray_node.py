"""A machine leaves a cluster of several: its Ray node is told to end, as the kubelet tells a pod that is deleted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tandem.testing.models import random_prompt, write_tiny_llama
from tests.e2e.conftest import ENDS_WITHIN_S, Cluster, RayNodes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VOCAB = 300
ASKS = [(random_prompt(60 + 40 * n, VOCAB, n), {"temperature": 0.8, "seed": n}) for n in range(4)]
ANSWER_TOKENS = 1600  # seconds: an answer that began before a worker is drained has not ended by then
COUNTS = ("tandem_retries_total", "tandem_moves_total")


async def answer(client: openai.AsyncOpenAI, prompt: list[int], sampling: dict[str, Any]) -> str:
    parts = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=ANSWER_TOKENS, stream=True, **sampling
    )
    return "".join([part.choices[0].text async for part in parts])


@asynccontextmanager
async def load(client: openai.AsyncOpenAI, expected: list[str]) -> AsyncIterator[list[int]]:
    """One client for each ask, again and again; each answer must be the undisturbed one. Yields how many each had."""
    answered, stop = [0] * len(ASKS), asyncio.Event()

    async def ask_again(number: int) -> None:
        while not stop.is_set():
            assert await answer(client, *ASKS[number]) == expected[number]
            answered[number] += 1

    asking = [asyncio.create_task(ask_again(number)) for number in range(len(ASKS))]
    try:
        yield answered
    finally:
        stop.set()
        await asyncio.gather(*asking)


def counted(cluster: Cluster, metric: str, *labels: str) -> float:
    lines = httpx.get(f"{cluster.base_url}/metrics", verify=False, timeout=60).text.splitlines()
    of_it = [line for line in lines if line.startswith(f"{metric}{{") and all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in of_it)


def worker_of(cluster: Cluster, worker_id: str) -> dict[str, Any]:
    worker: dict[str, Any] = next(each for each in cluster.status()["workers"] if each["id"] == worker_id)
    return worker


@pytest.mark.parametrize(
    "told_by",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak_only)],
    ids=["sigterm drains it", "sigint ends it at once"],
)
async def test_a_ray_node_that_is_told_to_end_costs_no_answer_and_another_takes_its_workers(
    nodes: RayNodes, cluster_with: Callable[..., Cluster], tmp_path: Path, told_by: signal.Signals
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    leaving = nodes.add()
    spec = {
        "models": [
            {"source": str(model), "prefill": {"workers": 0}, "decode": {"workers": 2}, "engine": {"kv_blocks": 800}}
        ],
        "router": {"policy": "round_robin"},  # both have work, whichever has the prompts cached
        "control": {"ray_address": nodes.address},
    }
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    on_node = {process.pid for process in psutil.Process(leaving.pid).children(recursive=True)}
    (there,) = [
        worker for worker in cluster.status()["workers"] if {each["pid"] for each in worker["processes"]} <= on_node
    ]
    async with cluster.async_client(timeout=120.0) as client:
        expected = await asyncio.gather(*(answer(client, *ask) for ask in ASKS))
        async with load(client, expected) as answered:
            while min(answered) < 1:
                await asyncio.sleep(0.1)
            before = [counted(cluster, name) for name in COUNTS]
            async with asyncio.timeout(60.0):  # one without work has nothing to move
                while not counted(cluster, "tandem_worker_requests", f'worker="{there["id"]}"', 'state="running"'):
                    await asyncio.sleep(0.01)
            leaving.send_signal(told_by)
            await asyncio.to_thread(leaving.wait, ENDS_WITHIN_S)
            drained = told_by == signal.SIGTERM
            ended = list(answered)
            while any(now < then + 2 for now, then in zip(answered, ended, strict=True)):
                await asyncio.sleep(0.1)
            grown = [counted(cluster, name) > then for name, then in zip(COUNTS, before, strict=True)]
            assert grown == [not drained, drained]
            waiting = worker_of(cluster, there["id"])
            assert (waiting["state"], waiting["processes"]) == ("restarting", []), "there is no room for it"
            nodes.add()
            await asyncio.to_thread(cluster.wait_ready)
    after = worker_of(cluster, there["id"])
    assert (after["epoch"] != there["epoch"], after["restarts"]) == (True, there["restarts"] + 1)
    cluster.assert_conserved()
