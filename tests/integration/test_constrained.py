"""Constrained answers through handoffs, lost workers and moves: the tokens that one undisturbed engine gives."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.requests.raw_request import RawRequest, RawSampling
from router.service import RouterService
from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.grammar.constraint import json_schema
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tandem.v1 import cluster_pb2
from tests.integration.conftest import StartRouted

VOCAB = 300
EOS = 2
STREAMS = 12
ENGINE = EngineSpec(kv_blocks=400, max_step_tokens=100)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "notes": {
            "type": "array",
            "items": {"type": "string", "minLength": 9, "maxLength": 12},
            "minItems": 6,
            "maxItems": 8,
        },
        "kind": {"enum": ["capital", "village"]},
    },
    "required": ["id", "notes", "kind"],
    "additionalProperties": False,
}
CONSTRAINT = json_schema(SCHEMA, "response_format")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 300}


class Stream:
    def __init__(self, number: int, expected: list[int]) -> None:
        self.sampling = RawSampling(**(SEEDED if number % 2 else GREEDY), constraint=CONSTRAINT)
        self.prompt = prompt(number)
        self.expected = expected
        self.tokens: list[int] = []
        self.reason = ""

    async def read(self, service: RouterService) -> None:
        submitted = await service.submit(RawRequest("tiny", tuple(self.prompt), self.sampling))
        async for pieces in submitted.stream:
            self.tokens += [token.token_id for piece in pieces for token in piece.tokens]
        assert submitted.stream.final is not None
        self.reason = submitted.stream.final.reason

    def assert_exact(self) -> None:
        assert self.tokens == self.expected
        assert self.reason == "stop"


def prompt(number: int) -> list[int]:
    return random_prompt(30 + 9 * number, VOCAB, number)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, seed=1, eos_token_id=EOS)


@pytest.fixture(scope="module")
def answers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of one engine alone, one request at a time; each is valid."""
    driver = EngineDriver(single_rank(tiny, tmp_path_factory.mktemp("alone") / "rendezvous", kv_blocks=400).engine)
    for number in range(STREAMS):
        sampling = SamplingParams.parse(
            **({"seed": 0} | (SEEDED if number % 2 else GREEDY)),
            stop_token_ids=frozenset({EOS}),
            grammar=CONSTRAINT.grammar,
        )
        driver.add(f"{number}", prompt(number), sampling)
        driver.run()
        jsonschema.validate(json.loads(Tokenizer.load(tiny).decode(driver.tokens[f"{number}"])), SCHEMA)
    return [driver.tokens[f"{number}"] for number in range(STREAMS)]


@pytest.mark.parametrize("decode_tp", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_handed_off_answer_is_that_of_one_engine(
    routed: StartRouted, tiny: Path, answers: list[list[int]], decode_tp: int
) -> None:
    async with routed(tiny, prefill=1, decode=1, decode_tp=decode_tp, engine=ENGINE) as live:
        streams = [Stream(number, answer) for number, answer in enumerate(answers)]
        await asyncio.gather(*(stream.read(live.app.service) for stream in streams))
        for stream in streams:
            stream.assert_exact()


@pytest.mark.slow
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_an_answer_goes_on_exactly_when_a_worker_is_killed(
    routed: StartRouted, tiny: Path, answers: list[list[int]], role: Role
) -> None:
    async with routed(tiny, prefill=2, decode=2, engine=ENGINE) as live:
        fleet = live.app.dispatcher.fleet
        streams = [Stream(number, answer) for number, answer in enumerate(answers)]
        if role is Role.PREFILL:  # or it could end all that it has before it is killed
            live.workers.live["prefill-0"].ranks[0].send_signal(signal.SIGSTOP)
        running = [asyncio.create_task(stream.read(live.app.service)) for stream in streams]
        if role is Role.PREFILL:
            victim = next(worker for worker in fleet.workers() if worker.key.worker_id == "prefill-0")
            await until(lambda: victim.account.requests > 0)
        else:
            await until(lambda: any(len(stream.tokens) >= 10 for stream in streams))
            victim = max(fleet.ready("tiny", role), key=lambda worker: worker.account.requests)
        live.workers.live[victim.key.worker_id].kill()
        await asyncio.gather(*running)
        for stream in streams:
            stream.assert_exact()
        assert "tandem_retries_total{" in live.app.metrics.render().decode()
        await live.workers.restart(victim.key.worker_id)
        await until(lambda: len(fleet.ready("tiny", role)) == 2)


async def test_an_answer_goes_on_exactly_when_it_moves(
    routed: StartRouted, tiny: Path, answers: list[list[int]]
) -> None:
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE) as live:
        workers = {worker.key.worker_id: worker for worker in live.app.dispatcher.fleet.ready("tiny", Role.DECODE)}
        streams = [Stream(number, answer) for number, answer in enumerate(answers)]
        running = [asyncio.create_task(stream.read(live.app.service)) for stream in streams]
        await until(lambda: any(len(stream.tokens) >= 10 for stream in streams))
        info = cluster_pb2.WorkerInfo()
        leaving = max(workers, key=lambda name: workers[name].account.requests)
        info.CopyFrom(live.workers.directory.workers[leaving])
        info.drain = cluster_pb2.DRAIN_MOVE
        await live.workers.directory.put(info)
        await until(lambda: not workers[leaving].account.requests)
        await asyncio.gather(*running)
        for stream in streams:
            stream.assert_exact()
        assert 'tandem_moves_total{model="tiny",result="done"}' in live.app.metrics.render().decode()
