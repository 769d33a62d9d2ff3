"""Tools and schemas through HTTP while workers die: clients read the same bytes as without it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.prefix_index.mirror import WorkerKey
from router.requests.run_on_links import RunOnLinks
from router.requests.state_machine import RequestRun
from router.testing.stub_worker import until
from router.workers.link import WorkerLink
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, worker_pb2
from tests.integration.conftest import Routed, StartRouted
from tests.integration.test_failover import retries

EVERY = bool(os.environ.get("TANDEM_SOAK"))
STREAMS, STEP, HANDOFF_KILLS = (200, 1, 50) if EVERY else (24, 12, 3)
TOGETHER = 8
VOCAB = 300
EOS = 2
ENGINE = EngineSpec(kv_blocks=6000, max_step_tokens=100, max_running_requests=256)
PATIENT = RouterSpec(  # what is withheld makes no worker a stalled one
    http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, worker_stall_s=600.0
)
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
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False, limits=limits) as client:
        await asyncio.gather(*(read.run(client) for read in reads))


async def read_all(live: Routed, numbers: range) -> Sequence[Read]:
    reads = [Read(number) for number in numbers]
    await run_all(live, reads)
    return reads


def any_is_busy(live: Routed, role: Role) -> bool:
    return any(worker.account.requests > 0 for worker in live.app.dispatcher.fleet.ready("tiny", role))


async def until_done_or(task: asyncio.Task[None], condition: Callable[[], bool]) -> None:
    await until(lambda: task.done() or condition())


async def kill(live: Routed, role: Role, worker: WorkerKey) -> None:
    """Kills the worker and waits until it has come back."""
    live.workers.live[worker.worker_id].kill()
    epoch = (await live.workers.restart(worker.worker_id)).epoch
    fleet, back = live.app.dispatcher.fleet, WorkerKey(worker.worker_id, epoch)
    await until(lambda: back in {ready.key for ready in fleet.ready("tiny", role)})


class Withheld:
    """Loses what a decode worker sends for an answer after its first `at` tokens, as its death would. Who takes over is
    heard."""

    def __init__(self) -> None:
        self.at: float = float("inf")
        self.first: dict[RequestRun, WorkerKey] = {}
        self.cut: dict[RequestRun, WorkerKey] = {}

    def start(self, at: float) -> None:
        self.at = at
        self.first, self.cut = {}, {}

    def filter(self, link: WorkerLink, frame: worker_pb2.WorkerFrame) -> None:
        if link.info.role != cluster_pb2.ROLE_DECODE:
            return
        tokens, ended, coming = list[worker_pb2.StepToken](), list[worker_pb2.Ended](), Counter[RequestRun | None]()
        for token in frame.tokens:
            run = self._client_run(link, token.request_id)
            if run is None or not self._is_beyond(link, run, coming[run]):
                tokens.append(token)
                coming[run] += 1
        for each in frame.ended:
            run = self._client_run(link, each.request_id)
            if run is None or self.cut.get(run) != link.key:
                ended.append(each)
        del frame.tokens[:], frame.ended[:]
        frame.tokens.extend(tokens)
        frame.ended.extend(ended)

    def _client_run(self, link: WorkerLink, wire_id: str) -> RequestRun | None:
        sink = link._sinks.get(wire_id)
        return sink.run if isinstance(sink, RunOnLinks) and sink.stream is not None else None

    def _is_beyond(self, link: WorkerLink, run: RequestRun, coming: int) -> bool:
        if self.first.setdefault(run, link.key) != link.key or run.answer_tokens + coming < self.at:
            return False
        self.cut[run] = link.key
        return True

    def all_wait(self) -> bool:
        return len(self.first) == STREAMS and all(run in self.cut or run.state.is_end for run in self.first)

    def all_ended(self, worker: WorkerKey) -> bool:
        return all(run.state.is_end for run, key in self.cut.items() if key == worker)


@pytest.fixture
def withheld(monkeypatch: pytest.MonkeyPatch) -> Withheld:
    made, deliver = Withheld(), WorkerLink._deliver

    def filtered(link: WorkerLink, frame: worker_pb2.WorkerFrame) -> None:
        made.filter(link, frame)
        deliver(link, frame)

    monkeypatch.setattr(WorkerLink, "_deliver", filtered)
    return made


@pytest.mark.slow
@pytest.mark.soak
async def test_clients_read_the_same_when_the_decode_worker_dies_at_any_token(
    routed: StartRouted, tiny: Path, withheld: Withheld
) -> None:
    """`make soak`: each of 200 streams loses its decode worker after each of its tokens but the last. Here some of
    both."""
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE, router=PATIENT) as live:
        undisturbed = await read_all(live, range(STREAMS))
        for read in undisturbed:
            read.assert_valid()
        lengths = [run.answer_tokens for run in withheld.first]
        assert len(lengths) == STREAMS
        kills = 0
        for at in range(1, max(lengths), STEP):
            withheld.start(at)
            reads = [Read(number) for number in range(STREAMS)]
            reading = asyncio.create_task(run_all(live, reads))
            await until(withheld.all_wait, 60.0)
            assert all(run.answer_tokens == at for run in withheld.cut)
            assert len(withheld.cut) == sum(length > at for length in lengths)
            kills += len(withheld.cut)
            for worker in sorted(set(withheld.cut.values())):
                await kill(live, Role.DECODE, worker)
                await until(partial(withheld.all_ended, worker), 60.0)
            await reading
            assert [read.parts() for read in reads] == [read.parts() for read in undisturbed], at
            print(f"{at} of {max(lengths)}: {len(withheld.cut)} streams lost their worker and are equal")
        assert retries(live) >= kills


@pytest.mark.slow
@pytest.mark.soak
async def test_clients_read_the_same_when_prefill_workers_die_in_handoffs(routed: StartRouted, tiny: Path) -> None:
    async with routed(tiny, prefill=2, decode=2, engine=ENGINE) as live:
        undisturbed = await read_all(live, range(TOGETHER))
        for _ in range(HANDOFF_KILLS):
            before = retries(live)
            while retries(live) == before:  # a worker may end what it has before a busy machine kills it
                reads = [Read(number) for number in range(TOGETHER)]
                reading = asyncio.create_task(run_all(live, reads))
                await until_done_or(reading, partial(any_is_busy, live, Role.PREFILL))
                workers = live.app.dispatcher.fleet.ready("tiny", Role.PREFILL)
                await kill(live, Role.PREFILL, max(workers, key=lambda worker: worker.account.requests).key)
                await reading
                assert [read.parts() for read in reads] == [read.parts() for read in undisturbed]
