"""The real model, split as its heads allow: SmolLM2 on TP 3 prefill and TP 1 decode says what the reference says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.checkpoint.model_store import resolve
from tandem.config.engine import EngineSpec
from tandem.config.model import DEMO_MODEL
from tandem.request import SamplingParams
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter

pytestmark = pytest.mark.slow

GOLDEN_FILE = Path(__file__).parents[1] / "data" / "smollm2_golden.json"
END_OF_TURN = 2
SAMPLING = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=frozenset({END_OF_TURN}))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [pytest.param(1, 1, marks=pytest.mark.soak_only), (3, 1)])
async def test_golden_tokens_at_every_width(pair: StartPair, prefill_tp: int, decode_tp: int) -> None:
    hand = ManualRouter()
    engine = EngineSpec(kv_blocks=64)
    async with pair(resolve(DEMO_MODEL), prefill_tp=prefill_tp, decode_tp=decode_tp, engine=engine) as live:
        for entry in json.loads(GOLDEN_FILE.read_text())["prompts"]:
            answer = await hand.handoff(live.prefill, live.decode, entry["prompt_ids"], SAMPLING)
            assert answer.tokens == entry["greedy_ids"]
            alone = await hand.generate(live.decode, entry["prompt_ids"], SAMPLING)
            assert alone.tokens == entry["greedy_ids"]
