"""A GPU fails under a decode worker: the worker ends with a typed error, and its requests go on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.testing.failing_rank import FAULT_FILE
from cluster.testing.failing_rank import __name__ as FAILING_RANK
from router.testing.stub_worker import until
from tandem.config.model import Role
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import ENGINE, GREEDY, MAX_TOKENS, VOCAB, Asked
from worker.exit_codes import GPU_LOST_EXIT_CODE

STEPS = MAX_TOKENS // 3  # in the middle of an answer


@pytest.mark.slow
async def test_a_failed_gpu_costs_no_answer_and_its_rank_says_why(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    prompts = [random_prompt(100 + 40 * number, VOCAB, number) for number in range(4)]
    expected = [
        reference_for(model_dir).answer(prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        for prompt in prompts
    ]
    async with routed(model_dir, prefill=1, decode=2, engine=ENGINE) as live:
        workers, fleet = live.workers, live.app.dispatcher.fleet
        workers.rank_module, workers.forks = FAILING_RANK, None
        first = workers.live["decode-0"].launch.epoch
        await workers.restart("decode-0")
        failing = workers.live["decode-0"]
        await until(lambda: fleet.count_ready(Role.DECODE) == 2 and failing.launch.epoch != first)
        await asyncio.to_thread(Path(failing.launch.run_dir, FAULT_FILE).write_text, str(STEPS))
        asked = [Asked(live.app.service, prompt, GREEDY) for prompt in prompts]
        assert await asyncio.to_thread(failing.ranks[0].wait, 60) == GPU_LOST_EXIT_CODE
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == expected
        last = [line for line in failing.log.read_text().splitlines() if "rank-0" in line][-1]
        assert "cpu failed: CUDA error: an illegal memory access" in last
        assert "tandem_retries_total{" in live.app.metrics.render().decode()
