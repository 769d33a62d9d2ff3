"""A transfer agent can be killed and replaced; the worker, its requests and its other handoffs go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.testing.live import LivePair
from tandem.config.engine import EngineSpec
from tandem.config.transfer import TransportKind
from tandem.errors import TandemError
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter, RequestResult

pytestmark = pytest.mark.slow

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize(
    ("side", "transport"),
    [
        ("prefill-0", TransportKind.MAPPED),
        ("decode-0", TransportKind.PROCESS_GROUP),
        pytest.param("decode-0", TransportKind.MAPPED, marks=pytest.mark.soak_only),
        pytest.param("prefill-0", TransportKind.TCP, marks=pytest.mark.soak_only),
    ],
)
async def test_a_replaced_agent_takes_new_handoffs(
    pair: StartPair, tmp_path: Path, reference_for: Callable[[Path], Reference], transport: TransportKind, side: str
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    expected = reference_for(model_dir).answer(random_prompt(50, VOCAB), GREEDY)
    hand = ManualRouter()
    async with pair(model_dir, transport=transport, engine=EngineSpec(kv_blocks=64)) as live:
        worker = live.workers.live[side]
        worker.agents[0].kill()
        worker.agents[0].wait()
        told = await first_error(hand, live)
        assert "transfer agent" in told.message
        assert told.wire.retryable
        worker.restart_agent(0)
        answer = await first_answer(hand, live)
        assert answer.tokens == expected
        assert answer.kv_bytes > 0


async def first_error(hand: ManualRouter, live: LivePair) -> TandemError:
    """The loss is noticed within a step, not at once."""
    for _ in range(100):
        try:
            await hand.handoff(live.prefill, live.decode, random_prompt(50, VOCAB), GREEDY)
        except TandemError as error:
            return error
    raise AssertionError("the lost agent was never noticed")


async def first_answer(hand: ManualRouter, live: LivePair) -> RequestResult:
    """What a patient client gets."""
    for _ in range(600):
        try:
            prompt = random_prompt(50, VOCAB)
            return await hand.handoff(live.prefill, live.decode, prompt, GREEDY, use_decode_cache=False)
        except TandemError:
            await asyncio.sleep(0.1)
    raise AssertionError("the replaced agent never took a handoff")


async def test_an_agent_that_hangs_is_ended_by_its_leader(pair: StartPair, tmp_path: Path) -> None:
    """Its peers and the routers move on before; without this the worker would never take a handoff again."""
    hand = ManualRouter()
    async with pair(write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1), engine=EngineSpec(kv_blocks=64)) as live:
        worker = live.workers.live["decode-0"]
        worker.agents[0].send_signal(signal.SIGSTOP)
        with pytest.raises(TandemError):
            await hand.handoff(live.prefill, live.decode, random_prompt(50, VOCAB), GREEDY)
        assert await asyncio.to_thread(worker.agents[0].wait, 60.0) == -signal.SIGKILL
        worker.restart_agent(0)
        assert (await first_answer(hand, live)).tokens
