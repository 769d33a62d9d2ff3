"""Tools and schemas through HTTP while workers die: clients read the same bytes as without it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.testing.stub_worker import until
from tandem.config.spec import EngineSpec, Role
from tandem.testing.models import write_tiny_llama
from tests.integration.conftest import Routed, StartRouted
from tests.integration.test_failover import retries

EVERY = bool(os.environ.get("TANDEM_SOAK"))
STREAMS, STEP, BATCH, HANDOFF_KILLS = (200, 1, 25, 50) if EVERY else (24, 12, 8, 3)
TOGETHER = 8
VOCAB = 300
EOS = 2
ENGINE = EngineSpec(kv_blocks=1200, max_step_tokens=100)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "kind": {"enum": ["private", "business"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "save", "parameters": PERSON, "strict": True}}
OTHER = {"type": "function", "function": {"name": "find", "parameters": PERSON}}
KINDS: list[dict[str, Any]] = [
    {"tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "find"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
]


class Read:
    """One streamed answer. Ids and times differ between requests, so they are left out."""

    def __init__(self, number: int) -> None:
        how = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        content = f"Message {number}: {'abc ' * (number % 7)}"
        self.body = KINDS[number % len(KINDS)] | how
        self.body |= {
            "model": "tiny",
            "stream": True,
            "max_tokens": 400,
            "messages": [{"role": "user", "content": content}],
        }
        self.choices: list[dict[str, Any]] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=self.body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.choices.append(event["choices"][0])

    def parts(self) -> tuple[str, list[tuple[str, str]], str]:
        """Content, calls, reason of the end."""
        content, calls = "", dict[int, tuple[str, str]]()
        for choice in self.choices:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
        return content, [*calls.values()], self.choices[-1]["finish_reason"]

    def assert_valid(self) -> None:
        content, calls, reason = self.parts()
        assert reason == ("tool_calls" if calls else "stop")
        assert bool(content) != bool(calls)
        for text in [arguments for name, arguments in calls] or [content]:
            jsonschema.validate(json.loads(text), PERSON)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, seed=1, eos_token_id=EOS)


async def run_all(live: Routed, reads: Sequence[Read]) -> None:
    url = f"http://127.0.0.1:{live.app.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
        await asyncio.gather(*(read.run(client) for read in reads))


async def read_all(live: Routed, numbers: range) -> Sequence[Read]:
    reads = [Read(number) for number in numbers]
    await run_all(live, reads)
    return reads


def any_has(reads: Sequence[Read], events: int) -> bool:
    return any(len(read.choices) >= events for read in reads)


def any_is_busy(live: Routed, role: Role) -> bool:
    return any(worker.account.requests > 0 for worker in live.app.dispatcher.fleet.ready("tiny", role))


async def until_done_or(task: asyncio.Task[None], condition: Callable[[], bool]) -> None:
    await until(lambda: task.done() or condition())


async def kill_busiest(live: Routed, role: Role) -> None:
    """Kills the busiest worker of the role and waits until it has come back."""
    fleet = live.app.dispatcher.fleet
    workers = fleet.ready("tiny", role)
    victim = max(workers, key=lambda worker: worker.account.requests).key.worker_id
    live.workers.live[victim].kill()
    await live.workers.restart(victim)
    await until(lambda: len(fleet.ready("tiny", role)) == len(workers))


@pytest.mark.slow
@pytest.mark.soak
async def test_clients_read_the_same_when_the_decode_worker_dies_at_any_token(routed: StartRouted, tiny: Path) -> None:
    """`make soak`: at every token of 200 streams. Here some of both."""
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE) as live:
        undisturbed = await read_all(live, range(STREAMS))
        for read in undisturbed:
            read.assert_valid()
        longest = max(len(read.choices) for read in undisturbed)
        batches = [range(first, first + BATCH) for first in range(0, STREAMS, BATCH)]
        ats = range(1, longest, STEP)
        rounds = itertools.product(ats, batches) if EVERY else zip(ats, itertools.cycle(batches), strict=False)
        for at, numbers in rounds:
            reads = [Read(number) for number in numbers]
            reading = asyncio.create_task(run_all(live, reads))
            await until_done_or(reading, partial(any_has, reads, at))
            await kill_busiest(live, Role.DECODE)
            await reading
            assert [read.parts() for read in reads] == [undisturbed[number].parts() for number in numbers], at
            print(f"at {at} of {longest}, {numbers}: equal")
        assert retries(live) > len(ats) / 2


@pytest.mark.slow
@pytest.mark.soak
async def test_clients_read_the_same_when_prefill_workers_die_in_handoffs(routed: StartRouted, tiny: Path) -> None:
    async with routed(tiny, prefill=2, decode=2, engine=ENGINE) as live:
        undisturbed = await read_all(live, range(TOGETHER))
        for _ in range(HANDOFF_KILLS):
            reads = [Read(number) for number in range(TOGETHER)]
            reading = asyncio.create_task(run_all(live, reads))
            before = retries(live)
            await until_done_or(reading, partial(any_is_busy, live, Role.PREFILL))
            await kill_busiest(live, Role.PREFILL)
            await reading
            assert retries(live) > before, "nothing was disturbed"
            assert [read.parts() for read in reads] == [read.parts() for read in undisturbed]
