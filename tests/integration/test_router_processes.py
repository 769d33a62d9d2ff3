"""Two router processes of one cluster, as the controller starts them: alike, apart, and each dispensable."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import httpx
import openai
import psutil
import pytest
import pytest_asyncio

from cluster.cli.admin_client import Admin
from cluster.cli.commands.status import fetch_views, placements_of, to_json
from cluster.control.controller import Controller
from cluster.control.router_slot import RouterSlot, RouterState
from cluster.testing.running import check_conserved, running
from tandem.errors import NotFound
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one cluster serves all
REQUESTS = 10_000 if os.environ.get("TANDEM_SOAK") else 24
VOCAB = 300
MAX_TOKENS = 300
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
# None of these answers rests on a near tie of two logits.
ASKS = [(random_prompt(60 + 40 * n, VOCAB, n), SEEDED if n % 2 else GREEDY) for n in range(6)]


class Client:
    """Goes to one router, and when that breaks off to the next."""

    def __init__(self, routers: list[RouterSlot], first: int) -> None:
        order = [*routers[first:], *routers[:first]]
        self._clients = [
            openai.AsyncOpenAI(base_url=f"http://{r.http_address}/v1", api_key="none", max_retries=0) for r in order
        ]
        self.broken: list[str] = []  # what had come of answers that broke off
        self.text = ""
        self.begun = asyncio.Event()

    async def ask(self, prompt: list[int], sampling: dict[str, Any], max_tokens: int = MAX_TOKENS) -> str:
        async with AsyncExitStack() as opened:
            for client in [await opened.enter_async_context(each) for each in self._clients]:
                self.text = ""
                try:
                    stream = await client.completions.create(
                        model="tiny", prompt=prompt, max_tokens=max_tokens, stream=True, **sampling
                    )
                    reason = None
                    async for chunk in stream:
                        self.text += chunk.choices[0].text if chunk.choices else ""
                        reason = chunk.choices[0].finish_reason if chunk.choices else reason
                        self.begun.set()
                    if reason is not None:
                        return self.text
                except (openai.APIError, httpx.HTTPError):
                    pass  # the connection broke off
                self.broken.append(self.text)
        raise AssertionError("every router broke off")


async def answers(routers: list[RouterSlot], first: int, max_tokens: int = MAX_TOKENS) -> list[str]:
    asked = [Client(routers, first).ask(*ask, max_tokens) for ask in ASKS]
    return await asyncio.gather(*asked)


async def metric(router: RouterSlot, name: str, *labels: str) -> float:
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        lines = (await http.get(f"http://{router.http_address}/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith(name) and all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def serves_again(router: RouterSlot, restarts: int, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while router.restarts != restarts or (await router.status()).state is not RouterState.READY:
            await asyncio.sleep(0.05)


async def knows_the_prompts(router: RouterSlot) -> None:
    """Events of workers reach it when they do."""
    async with asyncio.timeout(60.0):
        while await metric(router, "tandem_index_blocks") < sum(len(prompt) // 16 for prompt, _ in ASKS):
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def controller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Controller]:
    folder = tmp_path_factory.mktemp("r")
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    source = {
        "models": [{"source": str(model), "engine": {"kv_blocks": 400, "max_step_tokens": 100}}],
        "router": {"replicas": 2, "disaggregation": "always", "worker_stall_s": 300, "drain_timeout_s": 60},
    }
    async with running(source, folder) as controller:
        yield controller
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in left if "-m router" in command and str(folder) in command]


async def test_two_routers_answer_alike_share_their_index_and_are_both_shown(controller: Controller) -> None:
    second = controller.routers.slots[1]
    before = await metric(second, "tandem_index_credit_tokens_total", 'kind="given"')
    told = await answers(controller.routers.slots, 0, 24)
    assert len(set(told)) == len(told)
    await knows_the_prompts(second)
    assert await answers(controller.routers.slots, 1, 24) == told
    assert before == 0
    credited = await metric(second, "tandem_index_credit_tokens_total", 'kind="given"')
    assert credited >= sum(len(prompt) // 16 * 16 - 16 for prompt, _ in ASKS), "it knew what the first one caused"
    assert await metric(second, "tandem_index_credit_tokens_total", 'kind="wrong"') == 0

    async with grpc.aio.insecure_channel(controller.admin_address) as channel:
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        status = await stub.GetStatus(cluster_pb2.GetStatusRequest())
        listed = await stub.ListTraces(trace_pb2.ListTracesRequest(limit=100))
    shown = to_json(status)
    assert shown["router_ready"] is True
    assert [(router["id"], router["state"]) for router in shown["routers"]] == [
        ("router-0", "ready"),
        ("router-1", "ready"),
    ]
    assert len({router[kind] for router in shown["routers"] for kind in ("http", "grpc")}) == 4
    assert {"router-0", "router-1", "redis"} <= {process["name"] for process in shown["processes"]}
    assert len(listed.traces) == 2 * len(ASKS), "those of both"
    assert shown["local_prefill_max_tokens"] == 32
    assert sum(placements_of(await fetch_views(Admin(controller.admin_address))).values()) == 2 * len(ASKS)
    one = await controller.routers.traces.get(trace_pb2.GetTraceRequest(request_id=listed.traces[0].request_id))
    assert one == listed.traces[0]
    with pytest.raises(NotFound):
        await controller.routers.traces.get(trace_pb2.GetTraceRequest(request_id="nobody"))


async def test_a_killed_router_costs_a_client_that_reconnects_nothing_and_comes_back(controller: Controller) -> None:
    first, second = controller.routers.slots
    expected = await answers(controller.routers.slots, 1)
    clients = [Client(controller.routers.slots, 0) for _ in ASKS]
    pid = (await first.processes())[0].pid
    asked = [asyncio.create_task(client.ask(*ask)) for client, ask in zip(clients, ASKS, strict=True)]
    await asyncio.gather(*(client.begun.wait() for client in clients[:3]))
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert await asyncio.gather(*asked) == expected
    broken = [text for client in clients for text in client.broken]
    assert broken, "nothing was disturbed"
    assert all(any(whole.startswith(part) for whole in expected) for part in broken)
    # What it had on workers ended with it: the other one's reports say so.
    await check_conserved(controller)
    assert second.restarts == 0
    await serves_again(first, 1)
    await knows_the_prompts(first)
    print(f"killed router served again after {time.monotonic() - killed_s:.1f} s")
    assert await answers(controller.routers.slots, 0) == expected
    credited = await metric(first, "tandem_index_credit_tokens_total", 'kind="given"')
    assert credited >= sum(len(prompt) // 16 * 16 - 16 for prompt, _ in ASKS), "it has built its index anew"


async def keyed(router: RouterSlot, key: str, prompt: list[int]) -> httpx.Response:
    """An answer so long that it is under way for as long as it takes to see that, and to ask again."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4 * MAX_TOKENS, "stream": True, **SEEDED}
    headers = {"idempotency-key": key, "x-request-id": "of-the-client"}
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"http://{router.http_address}/v1/completions", json=body, headers=headers)


async def finished(router: RouterSlot) -> float:
    return await metric(router, "tandem_requests_total", 'state="finished"')


async def runs_one(router: RouterSlot) -> None:
    async with asyncio.timeout(60.0):
        while not await metric(router, "tandem_running_requests"):
            await asyncio.sleep(0.01)


@pytest.mark.acceptance(6, here="one kill, during a request and after one")
async def test_a_repeated_request_is_answered_once_also_through_another_router_and_after_a_kill(
    controller: Controller,
) -> None:
    first, second = controller.routers.slots
    ran = await finished(second)
    prompt = ASKS[1][0]
    original = await keyed(first, "done", prompt)
    under_way = asyncio.create_task(keyed(first, "under way", prompt))
    await runs_one(first)
    repeats = await asyncio.gather(*(keyed(router, "under way", prompt) for router in (first, second)))
    assert {repeat.content for repeat in repeats} == {(await under_way).content}
    assert [repeat.headers.get("idempotency-replayed") for repeat in repeats] == ["true", "true"]
    assert await finished(second) == ran, "it has run none itself"

    broken = asyncio.create_task(keyed(first, "broken", prompt))
    await runs_one(first)
    restarts = first.restarts
    os.kill((await first.processes())[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await broken
    again = await keyed(second, "done", prompt)
    assert (again.content, again.headers["idempotency-replayed"]) == (original.content, "true")
    assert await finished(second) == ran, "its answer outlives the router"
    retries = await asyncio.gather(*(keyed(second, "broken", prompt) for _ in range(2)))
    assert retries[0].content == retries[1].content
    assert {retry.headers.get("idempotency-replayed") for retry in retries} == {None, "true"}, "in either order"
    assert await finished(second) == ran + 1, "what the killed one had begun, once"
    await check_conserved(controller)
    await serves_again(first, restarts + 1)


def restarts_of_all(controller: Controller) -> list[int]:
    workers = controller.workers.slots.values()
    return [*(each.restarts for each in controller.routers.slots), *(each.restarts for each in workers)]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.acceptance(27, here="routers and workers, once, under running requests", soak="10,000 requests")
async def test_a_rolling_restart_of_routers_and_workers_fails_no_request(controller: Controller) -> None:
    slots = controller.routers.slots
    expected = await answers(slots, 1, 24)
    before = restarts_of_all(controller)
    answered = rolls = 0

    async def ask_again(number: int) -> None:
        nonlocal answered
        ask = number % len(ASKS)
        while answered < REQUESTS or not rolls:
            assert await Client(slots, number % 2).ask(*ASKS[ask], 24) == expected[ask]
            answered += 1

    asking = asyncio.gather(*(ask_again(number) for number in range(2 * len(ASKS))))
    while not asking.done():
        await controller.restart.begin("", move=True, routers=True)
        async with asyncio.timeout(300):
            while not controller.restart.status().is_over:
                await asyncio.sleep(0.05)
        assert controller.restart.status().failure == ""
        rolls += 1
    await asking
    after = restarts_of_all(controller)
    assert after == [count + rolls for count in before]
    await check_conserved(controller)
    print(f"{rolls} rolling restarts under {answered} requests")


async def test_a_router_that_is_told_to_end_lets_running_answers_end_first(controller: Controller) -> None:
    second = controller.routers.slots[1]
    restarts = second.restarts
    expected = await answers(controller.routers.slots, 0)
    clients = [Client(controller.routers.slots, 1) for _ in ASKS]
    pid = (await second.processes())[0].pid
    asked = [asyncio.create_task(client.ask(*ask)) for client, ask in zip(clients, ASKS, strict=True)]
    await asyncio.gather(*(client.begun.wait() for client in clients))
    os.kill(pid, signal.SIGTERM)
    assert not all(each.done() for each in asked)
    assert await asyncio.gather(*asked) == expected
    assert not [text for client in clients for text in client.broken]
    await check_conserved(controller)
    await serves_again(second, restarts + 1)
