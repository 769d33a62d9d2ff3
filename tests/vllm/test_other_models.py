"""Models that Tandem's own engine does not run, and models with windows: a pair of vLLM's answers as one vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.model_config import ModelConfig
from tandem.errors import CheckpointError
from tandem.testing.models import random_prompt
from tests.integration.conftest import StartRouted
from tests.integration.test_migration import Asked
from tests.vllm.conftest import ENGINE
from tests.vllm.vllms_models import alone, write_gemma3, write_gpt2, write_mistral, write_olmo

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
PROMPTS = [random_prompt(20 + 67 * number, 250, number) for number in range(4)]


@pytest.mark.parametrize(
    ("write", "decode_tp"), [(write_gpt2, 1), (write_olmo, 2), (write_gemma3, 2), (write_mistral, 1)]
)
async def test_a_pair_answers_as_vllm_alone_does(
    routed: StartRouted, write: Callable[[Path], Path], decode_tp: int, tmp_path: Path
) -> None:
    model_dir = write(tmp_path / "tiny")
    expected = await alone(model_dir, [{"prompt": each, "images": [], "tokens": TOKENS} for each in PROMPTS])
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    async with routed(model_dir, prefill=1, decode=1, decode_tp=decode_tp, engine=ENGINE) as live:
        asked = [Asked(live.app.service, prompt, GREEDY) for prompt in PROMPTS]
        async with asyncio.timeout(300):
            await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == expected


@pytest.mark.parametrize("write", [write_gpt2, write_olmo])
def test_tandems_own_engine_refuses_them_by_name(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="others by another engine"):
        ModelConfig.load(write(tmp_path / "tiny"))
