"""Requests that break workers: one that makes a step fail ends alone; one that kills is not tried on a third worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.testing.failing_rank import BREAKS, CRAWLS, HANGS, KILLS, RAISES
from cluster.testing.failing_rank import __name__ as FAILING_RANK
from router.testing.stub_worker import until
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.errors import RequestFailed, RequestQuarantined
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import ENGINE, GREEDY, MAX_TOKENS, VOCAB, Asked
from worker.exit_codes import ENGINE_HUNG_EXIT_CODE


async def test_they_end_with_errors_of_their_own_and_the_others_are_answered(
    routed: StartRouted,
    reference_for: Callable[[Path], Reference],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    prompts = [random_prompt(60 + 40 * number, VOCAB, number) for number in range(3)]
    expected = [
        reference_for(model_dir).answer(prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        for prompt in prompts
    ]
    async with routed(model_dir, prefill=0, decode=3, engine=ENGINE, rank_module=FAILING_RANK) as live:
        service, fleet = live.app.service, live.app.dispatcher.fleet
        asked = [Asked(service, prompt, GREEDY) for prompt in prompts]
        await asyncio.gather(*(each.has(3) for each in asked))
        with pytest.raises(RequestFailed, match=r"the request cannot be computed: .*no row for this token"):
            await Asked(service, RAISES + prompts[0], GREEDY).task
        with pytest.raises(RequestFailed, match="the request cannot be computed: KeyError"):
            await Asked(service, BREAKS + prompts[0], GREEDY).task
        await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == expected
        assert fleet.count_ready(Role.DECODE) == 3

        with pytest.raises(RequestQuarantined, match=r"decode-\d and decode-\d died"), caplog.at_level(logging.ERROR):
            await Asked(service, KILLS + prompts[0], GREEDY | {"top_k": 5}).task
        await until(lambda: fleet.count_ready(Role.DECODE) == 1)
        (record,) = [record for record in caplog.records if record.message == "request quarantined"]
        shape = vars(record)
        assert (shape["prompt_tokens"], shape["top_k"], shape["max_tokens"]) == ("65", "5", str(MAX_TOKENS))
        assert 'tandem_retries_total{code="worker_died"' in live.app.metrics.render().decode()
        again = [Asked(service, prompt, GREEDY) for prompt in prompts]
        await asyncio.gather(*(each.task for each in again))
        assert [each.tokens for each in again] == expected


@pytest.mark.slow
async def test_a_step_that_takes_long_is_no_stall(routed: StartRouted, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, layers=6)
    router = RouterSpec(worker_stall_s=4.0, http_port=0, grpc_port=0)
    async with routed(model_dir, prefill=0, decode=2, engine=ENGINE, router=router, rank_module=FAILING_RANK) as live:
        asked = Asked(live.app.service, CRAWLS + random_prompt(8, VOCAB, 1), GREEDY | {"max_tokens": 4})
        await asked.task
        assert len(asked.tokens) == 4
        assert not live.app.dispatcher.fleet.health.ejected


@pytest.mark.slow
async def test_one_that_hangs_engines_is_quarantined_after_two_which_end(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    """The other requests of a worker that hangs go on at once elsewhere."""
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    prompts = [random_prompt(60 + 40 * number, VOCAB, number) for number in range(3)]
    router = RouterSpec(worker_stall_s=0.5, http_port=0, grpc_port=0)
    engine = ENGINE.model_copy(update={"hang_timeout_s": 20.0})  # more than a busy machine takes from the third worker
    async with routed(model_dir, prefill=0, decode=3, engine=engine, router=router, rank_module=FAILING_RANK) as live:
        service, fleet = live.app.service, live.app.dispatcher.fleet
        asked = [Asked(service, prompt, GREEDY) for prompt in prompts]
        await asyncio.gather(*(each.has(3) for each in asked))
        with pytest.raises(RequestQuarantined, match=r"decode-\d and decode-\d died"):
            await Asked(service, HANGS + prompts[0], GREEDY).task
        await until(lambda: fleet.count_ready(Role.DECODE) == 1)
        await asyncio.gather(*(each.task for each in asked))
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        assert [each.tokens for each in asked] == [reference_for(model_dir).answer(each, sampling) for each in prompts]
        running = live.workers.live.values()
        await until(lambda: [each.service.poll() for each in running].count(ENGINE_HUNG_EXIT_CODE) == 2)
        for worker in running:
            if worker.service.poll() is not None:
                worker.kill()  # as the controller does
                await asyncio.to_thread(worker.ranks[0].wait)
