"""A transfer agent can be killed and replaced; the worker, its requests and its other handoffs go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config import EngineSpec, TransportKind
from tandem.errors import TandemError
from tandem.request import SamplingParams
from tandem.testing import random_prompt, write_tiny_llama
from worker.testing import HandRouter

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("transport", [TransportKind.MAPPED, TransportKind.PROCESS_GROUP])
@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_a_replaced_agent_takes_new_handoffs(
    pair: Any, tmp_path: Path, reference_for: Callable[[Path], Any], transport: TransportKind, side: str
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    expected = reference_for(model_dir).answer(random_prompt(50, VOCAB), GREEDY)
    hand = HandRouter()
    async with pair(model_dir, transport=transport, engine=EngineSpec(kv_blocks=64)) as live:
        worker = live.workers.live[side]
        worker.agents[0].kill()
        worker.agents[0].wait()
        with pytest.raises(TandemError, match="transfer agent"):
            for _ in range(100):  # the loss is noticed within a step, not at once
                await hand.handoff(live.prefill, live.decode, random_prompt(50, VOCAB), GREEDY)
        worker.restart_agent(0)
        for attempt in range(100):
            try:
                prompt = random_prompt(50, VOCAB)
                answer = await hand.handoff(live.prefill, live.decode, prompt, GREEDY, use_decode_cache=False)
                break
            except TandemError as error:
                assert error.wire.retryable, error
                assert attempt < 99
                await asyncio.sleep(0.1)
        assert answer.tokens == expected
        assert answer.kv_bytes > 0
