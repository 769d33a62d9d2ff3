"""Model families through live workers: two prefill ranks hand over to two decode ranks, and an answer is moved on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.engine import EngineSpec
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt
from tests.conftest import Reference
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENGINE = EngineSpec(kv_blocks=64, max_step_tokens=48)


@pytest.mark.slow
async def test_a_handoff_between_two_and_two_ranks(
    pair: StartPair, some_family_dir: Path, reference_for: Callable[[Path], Reference]
) -> None:
    hand, prompt = ManualRouter(), random_prompt(100, 320)
    expected = reference_for(some_family_dir).answer(prompt, GREEDY)
    rest = replace(GREEDY, max_tokens=5)
    async with pair(some_family_dir, prefill_tp=2, decode_tp=2, engine=ENGINE) as live:
        assert (await hand.generate(live.decode, prompt, GREEDY)).tokens == expected
        moved = await hand.handoff(live.prefill, live.decode, prompt, GREEDY, use_decode_cache=False)
        assert moved.tokens == expected
        # As after a migration: what was said so far is part of the prompt.
        continued = await hand.handoff(live.prefill, live.decode, [*prompt, *expected[:3]], rest)
        assert continued.tokens == expected[3:]
