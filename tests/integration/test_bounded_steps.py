"""Workers with a longest step before a real router: it knows of them, and answers beside many prompts are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config.engine import EngineSpec
from tandem.config.router import RouterSpec
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import GREEDY, MAX_TOKENS, VOCAB, Asked


@pytest.mark.slow
async def test_prompts_beside_answers_give_the_reference_tokens_and_the_router_knows_that_steps_are_bounded(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    prompts = [random_prompt(20 + 90 * (number % 4), VOCAB, number) for number in range(12)]
    engine = EngineSpec(kv_blocks=512, longest_step_s=1e-4)  # less than any step: all prompts are cut small
    router = RouterSpec(http_port=0, grpc_port=0)
    async with routed(model_dir, prefill=1, decode=1, engine=engine, router=router) as live:
        asked = []
        for prompt in prompts:
            asked.append(Asked(live.app.service, prompt, GREEDY))
            await asyncio.sleep(0.02)
        await asyncio.gather(*(each.task for each in asked))
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        assert [each.tokens for each in asked] == [reference_for(model_dir).answer(each, sampling) for each in prompts]
        assert all(worker.candidate(0).bounds_steps for worker in live.app.dispatcher.fleet.workers())
