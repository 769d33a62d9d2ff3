"""Workers that collect batches, before a real router: collecting is no stall, and answers move between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.router import RouterSpec
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import GREEDY, MAX_TOKENS, VOCAB, Asked
from tests.integration.test_moving import DONE, told
from tests.integration.test_prediction import predicted

ROUTER = RouterSpec(worker_stall_s=3.0, http_port=0, grpc_port=0)


def static(**options: object) -> EngineSpec:
    return EngineSpec.model_validate({"kv_blocks": 256, "batching": "static"} | options)


@pytest.mark.slow
async def test_a_worker_that_collects_for_longer_than_a_stall_is_healthy(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    prompts = [random_prompt(60 + 40 * number, VOCAB, number) for number in range(3)]
    engine = static(max_running_requests=8, batching_window_s=2.0)
    async with routed(model_dir, prefill=0, decode=1, engine=engine, router=ROUTER) as live:
        asked = []
        for prompt in prompts:
            asked.append(Asked(live.app.service, prompt, GREEDY))
            await asyncio.sleep(1.2)  # less than the window, so that the batch begins two seconds after the last
        await asyncio.gather(*(each.task for each in asked))
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        assert [each.tokens for each in asked] == [reference_for(model_dir).answer(each, sampling) for each in prompts]
        assert not live.app.dispatcher.fleet.health.ejected
        assert "tandem_retries_total{" not in live.app.metrics.render().decode()


@pytest.mark.slow
async def test_answers_move_to_a_worker_whose_batch_runs(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    """The answers are long enough to be under way when the worker is told."""
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    expected = predicted(reference_for(model_dir), 3)
    sampling: dict[str, object] = {"temperature": 0.0, "max_tokens": len(expected[0].expected), "ignore_eos": True}
    engine = static(max_running_requests=8, batching_window_s=0.0)
    async with routed(model_dir, prefill=0, decode=2, engine=engine, router=ROUTER) as live:
        workers = {worker.key.worker_id: worker for worker in live.app.dispatcher.fleet.workers()}
        asked = [Asked(live.app.service, each.prompt, sampling) for each in expected]
        await asyncio.gather(*(each.has(2) for each in asked))
        leaving = max(workers, key=lambda name: workers[name].account.requests)
        await told(live.workers, leaving, move=True)
        await until(lambda: not workers[leaving].account.requests)
        lines = live.app.metrics.render().decode().splitlines()
        assert sum(float(line.split()[-1]) for line in lines if line.startswith(DONE)) >= 1
        await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == [each.expected for each in expected]
