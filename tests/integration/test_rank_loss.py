"""One rank lost is the worker lost: its other ranks end at once, and say why, so that the whole can come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.config.spec import EngineSpec
from tandem.errors import WorkerLost
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter

LONG = SamplingParams(temperature=0.0, max_tokens=900)


@pytest.mark.parametrize(("busy", "lost"), [(True, 1), pytest.param(False, 0, marks=pytest.mark.soak_only)])
async def test_the_other_rank_ends_with_a_typed_error(pair: StartPair, tmp_path: Path, lost: int, busy: bool) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", seed=1)
    async with pair(model_dir, decode_tp=2, engine=EngineSpec(kv_blocks=80)) as live:
        worker = live.workers.live["decode-0"]
        running = None
        if busy:
            running = asyncio.create_task(ManualRouter().generate(live.decode, random_prompt(20, 300), LONG))
            await asyncio.sleep(0.5)
        worker.ranks[lost].kill()
        await asyncio.to_thread(worker.ranks[1 - lost].wait, 20)
        if running is not None:
            with pytest.raises(WorkerLost):
                await running
        assert "RuntimeError" not in worker.log.read_text()
        async with asyncio.timeout(10):
            while not live.decode.lost:
                await asyncio.sleep(0.05)
