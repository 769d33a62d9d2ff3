"""Workers with another engine than ours, in processes of their own, behind a router and with real handoffs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.testing.small_rank import __name__ as SMALL_RANK
from tandem.errors import UnsupportedField
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.testing.small_engine import VOCAB, answer_of
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import Asked

MAX_TOKENS = 24
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


async def test_another_engine_serves_with_our_handoffs(routed: StartRouted, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny")
    prompts = [random_prompt(10 + 13 * number, VOCAB, number) for number in range(8)]
    async with routed(model_dir, prefill=1, decode=2, rank_module=SMALL_RANK) as live:
        asked = [Asked(live.app.service, prompt, GREEDY) for prompt in prompts]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == [answer_of(prompt, MAX_TOKENS) for prompt in prompts]


async def test_what_another_engine_cannot_do_is_refused_by_name(routed: StartRouted, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny")
    async with routed(model_dir, prefill=1, decode=1, rank_module=SMALL_RANK) as live:
        asked = Asked(live.app.service, random_prompt(10, VOCAB, 0), GREEDY | {"prompt_logprobs": 0})
        with pytest.raises(UnsupportedField, match="logprobs of the prompt: no engine of tiny"):
            async with asyncio.timeout(30):
                await asked.task
