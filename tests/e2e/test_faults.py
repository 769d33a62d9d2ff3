"""Parts of a whole cluster are killed under traffic. Requests end right or with a typed, retryable error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Cluster, Golden

pytestmark = pytest.mark.e2e
MODEL = "smollm2-135m"


async def ask(client: openai.AsyncOpenAI, entry: Golden, max_tokens: int = 32) -> str:
    stream = await client.completions.create(
        model=MODEL, prompt=entry.prompt_ids, temperature=0, max_tokens=max_tokens, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def kill_worker(worker: dict[str, Any], process: str) -> None:
    os.kill(next(found["pid"] for found in worker["processes"] if found["name"] == process), signal.SIGKILL)


async def test_killing_redis_fails_no_request(cluster: Cluster, golden: list[Golden]) -> None:
    async with cluster.async_client() as client:
        expected = [await ask(client, entry) for entry in golden]
        running = [asyncio.create_task(ask(client, golden[number % 3])) for number in range(6)]
        redis = [
            child
            for child in psutil.Process(cluster.process.pid).children(recursive=True)
            if "valkey" in child.name() or "valkey-server" in " ".join(child.cmdline())
        ]
        assert redis
        for process in redis:
            process.kill()
        later = [asyncio.create_task(ask(client, golden[number % 3])) for number in range(6)]
        answers = await asyncio.gather(*running, *later)
    assert answers == [expected[number % 3] for number in range(6)] * 2
    await asyncio.to_thread(cluster.wait_ready)
    cluster.assert_conserved()


@pytest.mark.parametrize(("role", "process"), [("prefill", "rank-0"), ("decode", "rank-0"), ("decode", "service")])
async def test_a_killed_worker_comes_back_under_a_new_epoch(
    cluster: Cluster, golden: list[Golden], role: str, process: str
) -> None:
    async with cluster.async_client(timeout=90.0) as client:
        expected = await ask(client, golden[1])
        before = cluster.worker(role)
        running = [asyncio.create_task(ask(client, golden[1])) for _ in range(4)]
        await asyncio.sleep(0.3)
        kill_worker(before, process)
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, openai.APIError), outcome
                assert getattr(outcome, "type", None) == "server_error"
            else:
                assert outcome == expected
        assert await ask(client, golden[1]) == expected
    await asyncio.to_thread(cluster.wait_ready)
    after = cluster.worker(role)
    assert after["epoch"] != before["epoch"]
    assert after["restarts"] == before["restarts"] + 1
    cluster.note_descendants()
    cluster.assert_conserved()


async def test_a_killed_transfer_agent_is_replaced_without_touching_the_worker(
    cluster: Cluster, golden: list[Golden]
) -> None:
    before = cluster.worker("decode")
    kill_worker(before, "agent-0")
    deadline = time.monotonic() + 20.0
    async with cluster.async_client() as client:
        expected = await ask(client, golden[0])
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
