"""Parts of live workers are killed under a real router: every answer comes whole, token by token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.requests.raw_request import RawRequest, RawSampling
from router.service import RouterService
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.request import SamplingParams
from tandem.testing.fork import Process
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import Routed, StartRouted

VOCAB = 300
MAX_TOKENS = 60
# Small steps, so that prompts go in several chunks.
ENGINE = EngineSpec(kv_blocks=300, max_step_tokens=100)
DRAFTS = ENGINE.model_copy(
    update={"speculation": "draft", "speculation_weights": "int8", "speculation_adaptive": False}
)
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": MAX_TOKENS}
# What penalties count must not change where an answer breaks off.
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2}
PENALISED = SEEDED | PENALTIES | {"logit_bias": tuple((token, 20.0) for token in range(5, 12))}


class Asked:
    """One request on its way: its tokens so far, and all of them in the end."""

    def __init__(self, service: RouterService, prompt: list[int], sampling: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(self._run(service, RawRequest("tiny", tuple(prompt), RawSampling(**sampling))))

    async def _run(self, service: RouterService, raw: RawRequest) -> None:
        submitted = await service.submit(raw)
        async for pieces in submitted.stream:
            async with self._changed:
                self.tokens += [token.token_id for piece in pieces for token in piece.tokens]
                self._changed.notify_all()
        assert submitted.stream.final is not None
        self.reason = submitted.stream.final.reason

    async def has(self, tokens: int) -> None:
        async with self._changed:
            async with asyncio.timeout(60.0):
                await self._changed.wait_for(lambda: len(self.tokens) >= tokens)


async def ask_until_busy(
    service: RouterService, asks: list[tuple[list[int], dict[str, Any]]], live: Routed, worker_id: str, process: str
) -> tuple[list[Asked], Process]:
    """The process is stopped with requests of its own: on a machine that stands still for a second it could have
    answered all of them. A rank holds some that it decodes and others on their way; an agent, handoffs."""
    worker = live.workers.live[worker_id]
    victim = (worker.ranks if process == "rank" else worker.agents)[0]
    while True:
        early = [Asked(service, *ask) for ask in asks[:4]]
        await asyncio.gather(*(asked.has(5) for asked in early))
        if process == "agent":
            victim.send_signal(signal.SIGSTOP)
        late = [Asked(service, *ask) for ask in asks[4:]]
        await late[0].has(1)
        if process == "agent":
            await asyncio.gather(*(asked.task for asked in early))
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what it had sent has arrived
        workers = live.app.dispatcher.fleet.ready("tiny", Role(worker_id.partition("-")[0]))
        if any(each.key.worker_id == worker_id and each.account.requests for each in workers):
            return [*early, *late], victim
        victim.send_signal(signal.SIGCONT)
        await asyncio.gather(*(asked.task for asked in [*early, *late]))


@pytest.mark.parametrize(
    ("worker_id", "process"),
    [
        ("decode-0", "rank"),
        pytest.param("prefill-0", "agent", marks=pytest.mark.slow),
        pytest.param("prefill-0", "rank", marks=pytest.mark.soak_only),
        pytest.param("decode-0", "agent", marks=pytest.mark.soak_only),
    ],
)
@pytest.mark.parametrize("engine", [ENGINE, pytest.param(DRAFTS, marks=pytest.mark.slow)], ids=["", "with drafts"])
async def test_every_answer_is_whole_whatever_is_killed(
    routed: StartRouted,
    reference_for: Callable[[Path], Reference],
    tmp_path: Path,
    worker_id: str,
    process: str,
    engine: EngineSpec,
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    kinds = (GREEDY, SEEDED, GREEDY, PENALISED)
    asks = [(random_prompt(120 + 40 * n, VOCAB, n), kinds[n % 4]) for n in range(8)]
    expected = [reference_for(model_dir).answer(prompt, SamplingParams(**sampling)) for prompt, sampling in asks]
    async with routed(model_dir, prefill=1, decode=2, engine=engine) as live:
        service = live.app.service
        asked, victim = await ask_until_busy(service, asks, live, worker_id, process)
        victim.kill()
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == expected
        assert {each.reason for each in asked} == {"length"}
        metrics = live.app.metrics.render().decode()
        assert 'tandem_retries_total{code="' in metrics, "nothing was disturbed"
