"""Parts of a whole cluster are killed under traffic. Every request ends with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest

from router.testing.stub_worker import until

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Golden

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MODEL = "smollm2-135m"


GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}


async def ask(
    client: openai.AsyncOpenAI,
    prompt: str | list[int],
    max_tokens: int = 32,
    sampling: dict[str, Any] = GREEDY,
    begun: asyncio.Event | None = None,
) -> str:
    stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, stream=True, **sampling)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        if begun is not None:
            begun.set()
    return text


def retries(cluster: Cluster) -> float:
    lines = httpx.get(f"{cluster.base_url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tandem_retries_total{"))


@pytest.mark.acceptance(8, here="12 requests; TTFT is not compared")
async def test_killing_redis_fails_no_request(cluster: Cluster, golden: list[Golden]) -> None:
    async with cluster.async_client() as client:
        expected = [await ask(client, entry.prompt_ids) for entry in golden]
        redis = [
            child
            for child in psutil.Process(cluster.process.pid).children(recursive=True)
            if "valkey" in child.name() or "valkey-server" in " ".join(child.cmdline())
        ]
        assert redis
        begun = asyncio.Event()
        asks = [ask(client, golden[number % 3].prompt_ids, begun=begun) for number in range(6)]
        running = [asyncio.create_task(each) for each in asks]
        await begun.wait()
        for process in redis:
            process.kill()
        later = [asyncio.create_task(ask(client, golden[number % 3].prompt_ids)) for number in range(6)]
        answers = await asyncio.gather(*running, *later)
    assert answers == [expected[number % 3] for number in range(6)] * 2
    await asyncio.to_thread(cluster.wait_ready)
    cluster.assert_conserved()


async def begin(
    client: openai.AsyncOpenAI, asks: list[tuple[str, int, dict[str, Any]]]
) -> tuple[list[asyncio.Task[str]], list[asyncio.Event]]:
    """The answers, and which of them have begun: at least one."""
    begun = [asyncio.Event() for _ in asks]
    answers = [ask(client, *each, begun=event) for each, event in zip(asks, begun, strict=True)]
    running = [asyncio.create_task(each) for each in answers]
    await until(lambda: any(each.is_set() for each in begun), 120.0)
    return running, begun


async def kill_under_eight_streams(cluster: Cluster, role: str, process: str) -> dict[str, Any]:
    """Greedy and seeded answers are the same afterwards, undisturbed. Returns the worker as it was.

    A prefill worker is stopped before it is killed: it could be done with all prompts between two looks at it.
    """
    story = "Once upon a time a lighthouse keeper wrote down every ship that passed in the night, " * 5
    before, retried = cluster.worker(role), retries(cluster)
    pid = next(found["pid"] for found in before["processes"] if found["name"] == process)
    async with cluster.async_client(timeout=120.0) as client:
        for turn in count():
            asks = [(f"{turn} {role} {process} {n}: {story}", 48, SEEDED if n % 2 else GREEDY) for n in range(8)]
            running, begun = await begin(client, asks)
            if role == "decode":
                break
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)  # what it had sent has arrived
            if not all(each.is_set() for each in begun):
                break
            os.kill(pid, signal.SIGCONT)
            await asyncio.gather(*running)
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*running)
        assert retries(cluster) > retried, "nothing was disturbed"
        await asyncio.to_thread(cluster.wait_ready)
        assert answers == await asyncio.gather(*(ask(client, *each) for each in asks))
    return before


@pytest.mark.parametrize(
    ("role", "process"),
    [("prefill", "rank-0"), pytest.param("decode", "service", marks=pytest.mark.soak_only)],
)
async def test_a_killed_worker_costs_no_answer_and_comes_back_under_a_new_epoch(
    cluster: Cluster, role: str, process: str
) -> None:
    before = await kill_under_eight_streams(cluster, role, process)
    after = cluster.worker(role)
    assert after["epoch"] != before["epoch"]
    assert after["restarts"] == before["restarts"] + 1
    cluster.note_descendants()
    cluster.assert_conserved()


@pytest.mark.soak_only  # as tests/integration/test_migration.py, under Ray
async def test_a_killed_transfer_agent_costs_no_answer_and_is_replaced_without_touching_the_worker(
    cluster: Cluster, golden: list[Golden]
) -> None:
    before = await kill_under_eight_streams(cluster, "decode", "agent-0")
    deadline = time.monotonic() + 120.0
    async with cluster.async_client() as client:
        expected = await ask(client, golden[0].prompt_ids)
        assert expected == "The capital of France is Paris."
    while True:
        after = cluster.worker("decode")
        if {p["name"]: p["pid"] for p in after["processes"]} != {p["name"]: p["pid"] for p in before["processes"]}:
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert after["epoch"] == before["epoch"]
    cluster.note_descendants()
    cluster.assert_conserved()
