"""Tools and schemas through HTTP while workers die: clients read the same bytes as without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
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


async def read_all(live: Routed, count: int) -> Sequence[Read]:
    reads = [Read(number) for number in range(count)]
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{live.app.http_port}", timeout=120, verify=False
    ) as client:
        await asyncio.gather(*(read.run(client) for read in reads))
    return reads


async def kill_often(live: Routed, role: Role, times: int) -> None:
    """Kills the busiest worker of the role, lets it come back, and again."""
    fleet = live.app.dispatcher.fleet
    for _ in range(times):
        await until(lambda: any(worker.account.requests for worker in fleet.ready("tiny", role)))
        victim = max(fleet.ready("tiny", role), key=lambda worker: worker.account.requests).key.worker_id
        live.workers.live[victim].kill()
        await live.workers.restart(victim)
        await until(lambda: len(fleet.ready("tiny", role)) == 2)


@pytest.mark.slow
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_clients_read_the_same_when_workers_are_killed(routed: StartRouted, tiny: Path, role: Role) -> None:
    async with routed(tiny, prefill=2, decode=2, engine=ENGINE) as live:
        undisturbed = await read_all(live, 24)
        for read in undisturbed:
            read.assert_valid()
        killing = asyncio.create_task(kill_often(live, role, 2))
        disturbed = await read_all(live, 24)
        assert retries(live) > 0, "nothing was disturbed"
        assert [read.parts() for read in disturbed] == [read.parts() for read in undisturbed]
        while not killing.done():  # it needs requests to see
            await read_all(live, 4)
        await killing
