"""vLLM's engines in workers of their own, behind a router, with our handoffs between them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from router.edge.openai.embeddings import SAMPLING as EMBEDS
from router.requests.raw_request import RawRequest
from router.testing.stub_worker import until
from tandem.config.model import Role
from tandem.engine.api import EngineRequest
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.telemetry.resource_watch import SHARED_MEMORY
from tandem.testing.models import random_prompt
from tests.integration.conftest import Routed, StartRouted
from tests.integration.test_migration import Asked, ask_until_busy
from tests.integration.test_moving import told
from tests.vllm.conftest import ENGINE, VOCAB

if TYPE_CHECKING:
    from tandem.vllm_engine.rank import VllmRank

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": TOKENS}
PENALISED = GREEDY | {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2}
ROOMY = ENGINE.model_copy(update={"kv_blocks": 128})  # for all of ASKS at once: none is refused and retried
ASKS = [
    (random_prompt(7 + 41 * number, VOCAB, number), sampling)
    for number in range(6)
    for sampling in (GREEDY, SEEDED, PENALISED)
]


@pytest.fixture
def expected(rank: VllmRank) -> list[list[int]]:
    """The answers of one vLLM, each alone."""
    engine, found = rank.engine, []
    for number, (prompt, sampling) in enumerate(ASKS):
        key = HashKey("tiny", cache_salt=b"%d" % number)
        engine.add(EngineRequest(f"alone-{number}", tuple(prompt), SamplingParams(**sampling), key))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [each.token_id for each in engine.step().tokens]
        found.append(tokens)
    return found


async def answers(live: Routed) -> list[list[int]]:
    asked = [Asked(live.app.service, list(prompt), sampling) for prompt, sampling in ASKS]
    async with asyncio.timeout(300):
        await asyncio.gather(*(each.task for each in asked))
    return [each.tokens for each in asked]


def handoffs(live: Routed) -> float:
    """How many were done."""
    lines = live.app.metrics.render().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tandem_handoff_seconds_count"))


async def embeddings(live: Routed) -> list[bytes]:
    asked = [await live.app.service.submit(RawRequest("tiny", tuple(prompt), EMBEDS)) for prompt, _ in ASKS[::3]]
    for each in asked:
        async for _ in each.stream:
            pass
    return [each.stream.embedding for each in asked]


def embedded(rank: VllmRank, prompt: list[int], name: str) -> bytes:
    """By one vLLM, alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, embeds=True)
    rank.engine.add(EngineRequest(name, tuple(prompt), sampling, HashKey("tiny", cache_salt=name.encode())))
    found = b""
    while rank.engine.has_work:
        found = found or b"".join(each.embedding for each in rank.engine.step().tokens)
    return found


async def test_a_pair_answers_as_one_vllm_does(
    routed: StartRouted, model_dir: Path, expected: list[list[int]], rank: VllmRank
) -> None:
    alone = [embedded(rank, prompt, f"embeds-{number}") for number, (prompt, _) in enumerate(ASKS[::3])]
    async with routed(model_dir, prefill=1, decode=1, engine=ROOMY) as live:
        assert await answers(live) == expected
        await until(lambda: handoffs(live) == len(ASKS))  # observed once the answers have ended
        for one, other in zip(await embeddings(live), alone, strict=True):
            np.testing.assert_allclose(np.frombuffer(one, dtype="<f4"), np.frombuffer(other, dtype="<f4"), atol=1e-4)
        assert handoffs(live) == len(ASKS)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV needs AVX-512")
async def test_kv_in_fp8_is_handed_off(routed: StartRouted, model_dir: Path) -> None:
    eight = ROOMY.model_copy(update={"kv_dtype": "fp8"})
    async with routed(model_dir, prefill=0, decode=1, engine=eight) as live:
        alone = await answers(live)
    async with routed(model_dir, prefill=1, decode=1, engine=eight) as live:
        assert await answers(live) == alone
        await until(lambda: handoffs(live) == len(ASKS))


async def test_narrow_workers_hand_off_to_wide_ones(
    routed: StartRouted, model_dir: Path, expected: list[list[int]]
) -> None:
    """Two wide ones share the machine, and a killed one leaves nothing of what its ranks shared."""
    async with routed(model_dir, prefill=2, decode=2, decode_tp=2, engine=ROOMY) as live:
        fleet, killed = live.app.dispatcher.fleet, live.workers.live["decode-0"]
        found = await answers(live)
        await until(lambda: handoffs(live) == len(ASKS))  # observed once the answers have ended
        await live.workers.restart("decode-0")
        await until(lambda: fleet.count_ready(Role.DECODE) == 2, 60.0)
        assert [len(tokens) for tokens in await answers(live)] == [TOKENS] * len(ASKS)
        epochs = [each.launch.epoch for each in (killed, *live.workers.live.values())]
        assert not [path for epoch in epochs for path in SHARED_MEMORY.glob(f"vllm-*-{epoch:x}-*")]
    greedy = slice(0, None, 3)  # sums in another order may change which token is drawn
    assert found[greedy] == expected[greedy]


async def test_cancelled_requests_leave_nothing(routed: StartRouted, model_dir: Path) -> None:
    """The fixture counts the blocks of both workers."""
    chance = random.Random(5)
    async with routed(model_dir, prefill=1, decode=1, engine=ENGINE) as live:
        for _ in range(3):
            asked = [Asked(live.app.service, list(prompt), sampling) for prompt, sampling in ASKS]
            for each in chance.sample(asked, len(asked)):
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                each.task.cancel()
            await asyncio.gather(*(each.task for each in asked), return_exceptions=True)
        assert len((await answers(live))[0]) == TOKENS


@pytest.mark.parametrize(
    ("worker_id", "process"),
    [
        ("decode-0", "rank"),
        pytest.param("decode-0", "agent", marks=pytest.mark.slow),
        pytest.param("prefill-0", "rank", marks=pytest.mark.slow),
        ("prefill-0", "agent"),
    ],
)
async def test_every_answer_is_whole_whatever_is_killed(
    routed: StartRouted, model_dir: Path, expected: list[list[int]], worker_id: str, process: str
) -> None:
    async with routed(model_dir, prefill=1, decode=2, engine=ENGINE) as live:
        asked, victim = await ask_until_busy(live.app.service, ASKS, live, worker_id, process)
        victim.kill()
        async with asyncio.timeout(300):
            await asyncio.gather(*(each.task for each in asked))
        assert [each.tokens for each in asked] == expected
        assert 'tandem_retries_total{code="' in live.app.metrics.render().decode(), "nothing was disturbed"


async def test_workers_change_roles_and_are_emptied_while_they_answer(
    routed: StartRouted, model_dir: Path, expected: list[list[int]]
) -> None:
    """What runs on them goes on there: vLLM cannot move an answer that has begun."""
    async with routed(model_dir, prefill=1, decode=2, engine=ENGINE) as live:
        service, fleet = live.app.service, live.app.dispatcher.fleet
        early = [Asked(service, list(prompt), sampling) for prompt, sampling in ASKS[:9]]
        await asyncio.gather(*(each.has(2) for each in early))
        await told(live.workers, "decode-1", role=Role.PREFILL)
        await until(lambda: fleet.count_ready(Role.PREFILL) == 2 and fleet.count_ready(Role.DECODE) == 1)
        late = [Asked(service, list(prompt), sampling) for prompt, sampling in ASKS[9:]]
        await late[0].has(1)
        await told(live.workers, "prefill-0", move=True)
        workers = {worker.key.worker_id: worker for worker in fleet.workers()}
        async with asyncio.timeout(300):
            await until(lambda: not workers["prefill-0"].account.requests, 300.0)
            await asyncio.gather(*(each.task for each in [*early, *late]))
        assert [each.tokens for each in [*early, *late]] == expected
