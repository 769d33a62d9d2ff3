"""The same tokens whatever path the KV cache takes: widths, transports, caches, chunks. fp32, tiny random model.

Live processes on every path: ranks, transfer agents, services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.testing.device_rank import __name__ as DEVICE_RANK
from cluster.testing.live import LivePair
from tandem.config.engine import EngineSpec
from tandem.config.security import TlsSpec
from tandem.config.transfer import TransportKind, WireDtype
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter, WorkerSession

VOCAB = 300
LENGTHS = (1, 15, 16, 17, 100, 1000)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=7, max_tokens=8)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
# Small steps, so that long prompts go in many chunks that end inside blocks.
ENGINE = EngineSpec(kv_blocks=160, max_step_tokens=200)
MAPPED, GROUP, TCP = TransportKind.MAPPED, TransportKind.PROCESS_GROUP, TransportKind.TCP
# Every pair of widths over every transport takes a quarter of an hour: `make soak` does. Here every way to split and to
# join heads once, and every transport; (1, 1, MAPPED), (1, 2, MAPPED) and (2, 1, TCP) are those of other tests below.
USUAL_PATHS: dict[tuple[int, int, TransportKind], list[pytest.MarkDecorator]] = {
    (2, 1, MAPPED): [],
    (1, 2, TCP): [],
    **{path: [pytest.mark.slow] for path in ((1, 1, GROUP), (2, 2, GROUP), (1, 4, MAPPED))},
}
PATHS = [
    pytest.param(*path, marks=USUAL_PATHS.get(path, [pytest.mark.soak_only]))
    for path in product((1, 2, 4), (1, 2, 4), (MAPPED, GROUP, TCP))
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 heads over 2 KV heads: splits into 2, and into 4 with every KV head on two ranks."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=VOCAB, heads=4, kv_heads=2, seed=1)


@pytest.fixture
def reference(reference_for: Callable[[Path], Reference], tiny: Path) -> Reference:
    return reference_for(tiny)


async def test_aggregated(pair: StartPair, tiny: Path, reference: Reference) -> None:
    """Tokens, and logprobs the same as through a handoff."""
    hand = ManualRouter()
    async with pair(tiny, engine=ENGINE) as live:
        for length in LENGTHS:
            for sampling in (GREEDY, SEEDED):
                answer = await hand.generate(live.decode, prompt(length), sampling)
                assert answer.tokens == reference.answer(prompt(length), sampling), length
        seen = live.decode.frames_seen
        prompts = [prompt(100, 1), prompt(17, 2)]
        together = await hand.generate_together(live.decode, prompts, GREEDY)
        assert [answer.tokens for answer in together] == [reference.answer(each, GREEDY) for each in prompts]
        assert live.decode.frames_seen == seen + 2, "each counts as if it had come alone"
        alone = await hand.generate(live.decode, prompt(100, 3), LOGPROBS)
        moved = await hand.handoff(live.prefill, live.decode, prompt(100, 3), LOGPROBS, use_decode_cache=False)
    assert moved.tokens == alone.tokens
    assert moved.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


async def test_through_an_encrypted_handoff(
    pair: StartPair, tiny: Path, reference: Reference, authority: Callable[[str], Any]
) -> None:
    hand = ManualRouter()
    tls = TlsSpec(**authority("ours").issue("worker"))
    async with pair(tiny, prefill_tp=2, transport=TCP, tls=tls, engine=ENGINE) as live:
        answer = await hand.handoff(live.prefill, live.decode, prompt(100), GREEDY)
        assert answer.tokens == reference.answer(prompt(100), GREEDY)
        assert {link.transport for link in (await live.prefill.state()).links} == {"tcp"}


@pytest.mark.parametrize(
    ("kv_dtype", "cell_bytes", "prefill_tp", "decode_tp", "transport"),
    [
        ("int8", 20, 1, 2, MAPPED),
        pytest.param("int8", 20, 2, 1, TCP, marks=pytest.mark.slow),
        pytest.param("fp8", 16, 1, 2, TCP, marks=pytest.mark.slow),
        pytest.param("fp8", 16, 2, 1, GROUP, marks=pytest.mark.slow),
    ],
)
async def test_quantised_weights_and_kv_through_a_handoff(
    pair: StartPair, tiny: Path, tmp_path: Path, kv_dtype: str, cell_bytes: int, prefill_tp: int, decode_tp: int,
    transport: TransportKind,
) -> None:  # fmt: skip
    """As one process alone answers; blocks cross as they lie, a token of a head in `cell_bytes` instead of 64, also
    where links would make int8 of wider ones."""
    hand = ManualRouter()
    quantised: dict[str, Any] = {"weights": "int8", "kv_dtype": kv_dtype}
    alone = EngineDriver(single_rank(tiny, tmp_path / "alone", **quantised).engine)
    for length in LENGTHS:
        alone.add(str(length), prompt(length), SEEDED)
    alone.run()
    engine = ENGINE.model_copy(update=quantised)
    async with pair(
        tiny, prefill_tp=prefill_tp, decode_tp=decode_tp, transport=transport, engine=engine, wire_dtype=WireDtype.INT8
    ) as live:
        for length in LENGTHS:
            answer = await hand.handoff(live.prefill, live.decode, prompt(length), SEEDED)
            assert answer.tokens == alone.tokens[str(length)], length
            assert answer.kv_bytes == length * 2 * 2 * 2 * cell_bytes  # layers, K and V, KV heads


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"),
    [(1, 2, MAPPED), pytest.param(2, 1, TCP, marks=pytest.mark.soak_only)],
)
@pytest.mark.slow
async def test_prompts_that_the_pools_have_no_room_for_come_from_host_tiers_on_both_sides(
    pair: StartPair, tiny: Path, reference: Reference, prefill_tp: int, decode_tp: int, transport: TransportKind
) -> None:
    hand = ManualRouter()
    engine = ENGINE.model_copy(update={"kv_blocks": 32, "host_kv_memory_bytes": 4 << 20})
    prompts = [prompt(100, seed) for seed in range(40, 52)]
    expected = [reference.answer(each, GREEDY) for each in prompts]
    async with pair(tiny, prefill_tp=prefill_tp, decode_tp=decode_tp, transport=transport, engine=engine) as live:
        for turn in range(4):
            for n in range(0, len(prompts), 2):
                first, second = await asyncio.gather(
                    hand.handoff(live.prefill, live.decode, prompts[n], GREEDY),
                    hand.handoff(live.prefill, live.decode, prompts[n + 1], GREEDY, use_decode_cache=False),
                )
                assert [first.tokens, second.tokens] == expected[n : n + 2]
                assert (first.cached_tokens_decode, second.cached_tokens_prefill) == ((96, 96) if turn else (0, 0))
        for session in (live.prefill, live.decode):
            assert (await session.state()).load.host_blocks.used > 0


@pytest.mark.parametrize("ends_by", ["length", "stop token"])
@pytest.mark.slow
async def test_answers_that_end_at_their_first_token_fail_no_handoff(
    pair: StartPair, tiny: Path, reference: Reference, ends_by: str
) -> None:
    """The decode worker hears of the end from the router alone: a word of the prefill worker's could come to the router
    before the token itself, and have the prompt computed again. Of answers of one token no KV is moved."""
    hand = ManualRouter()
    async with pair(tiny, engine=ENGINE) as live:
        for seed in range(20):
            first = reference.answer(prompt(17, seed), GREEDY)[0]
            stops = {"max_tokens": 1} if ends_by == "length" else {"stop_token_ids": frozenset({first})}
            work = hand.work(prompt(17, seed), replace(GREEDY, **stops))
            ticket = await hand.reserve(live.prefill, live.decode, work)
            assert (await hand.prefill(live.prefill, work, ticket)).token_id == first
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await live.decode.event(work.request_id)
            live.decode.cancel(work.request_id)
        moved = sum(link.bytes for link in (await live.prefill.state()).links)
        assert (moved > 0) == (ends_by == "stop token")


async def cache_on_prefill_only(hand: ManualRouter, prefill: WorkerSession, decode: WorkerSession, tokens: Any) -> None:
    """The decode worker's side is cancelled, so it never commits what it received."""
    work = hand.work(tokens, GREEDY)
    ticket = await hand.reserve(prefill, decode, work)
    await hand.prefill(prefill, work, ticket)
    decode.cancel(work.request_id)


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "transport"), PATHS)
@pytest.mark.acceptance(29, here="five pairs of widths", soak="all nine, each transport")
async def test_through_a_handoff(
    pair: StartPair, tiny: Path, reference: Reference, prefill_tp: int, decode_tp: int, transport: TransportKind
) -> None:
    async with pair(tiny, prefill_tp=prefill_tp, decode_tp=decode_tp, transport=transport, engine=ENGINE) as live:
        await with_every_length(live, reference)
        await with_every_state_of_the_caches(live, reference, decode_tp)
        links = (await live.prefill.state()).links
        assert {link.transport for link in links} == {transport.value}
        assert {link.state for link in links} == {"ready"}


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.soak_only),
        pytest.param(2, 4, marks=pytest.mark.soak_only),
    ],
)
async def test_through_messages_between_devices(
    pair: StartPair, tiny: Path, reference: Reference, prefill_tp: int, decode_tp: int
) -> None:
    """The code of `nccl`, over gloo: gathered, digested, sent, verified and scattered in device staging."""
    async with pair(
        tiny, rank_module=DEVICE_RANK, forks=None, prefill_tp=prefill_tp, decode_tp=decode_tp,
        transport=TransportKind.NCCL, engine=ENGINE,
    ) as live:  # fmt: skip
        await with_every_length(live, reference)
        links = (await live.prefill.state()).links
        assert {(link.transport, link.state) for link in links} == {("nccl", "ready")}
        assert all(link.bytes > 0 for link in links)


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "transport"), [(2, 1, TCP), (1, 2, MAPPED)])
@pytest.mark.parametrize(
    "block_tokens", [32, *(pytest.param(each, marks=pytest.mark.soak_only) for each in (8, 64, 128))]
)
@pytest.mark.slow
@pytest.mark.acceptance(29, here="blocks of 32", soak="8 to 128")
async def test_through_a_handoff_of_blocks_of_other_sizes(
    pair: StartPair, tiny: Path, reference: Reference, block_tokens: int, prefill_tp: int, decode_tp: int,
    transport: TransportKind,
) -> None:  # fmt: skip
    engine = ENGINE.model_copy(update={"block_tokens": block_tokens, "kv_blocks": 160 * 16 // block_tokens})
    lengths = (1, block_tokens - 1, block_tokens, block_tokens + 1, 100, 1000)
    async with pair(tiny, prefill_tp=prefill_tp, decode_tp=decode_tp, transport=transport, engine=engine) as live:
        await with_every_length(live, reference, lengths)
        hand = ManualRouter()
        for cached in (False, True):
            found = await hand.handoff(live.prefill, live.decode, prompt(3 * block_tokens + 5, 40), GREEDY)
            assert found.tokens == reference.answer(prompt(3 * block_tokens + 5, 40), GREEDY)
            assert found.cached_tokens_decode == (3 * block_tokens if cached else 0)


async def with_every_length(live: LivePair, reference: Reference, lengths: Sequence[int] = LENGTHS) -> None:
    hand = ManualRouter()
    for length in lengths:
        for seed, sampling in enumerate((GREEDY, SEEDED)):
            answer = await hand.handoff(live.prefill, live.decode, prompt(length, seed), sampling)
            assert answer.tokens == reference.answer(prompt(length, seed), sampling), length
            assert answer.kv_bytes > 0


async def with_every_state_of_the_caches(live: LivePair, reference: Reference, decode_tp: int) -> None:
    hand = ManualRouter()
    token_bytes = 2 * 2 * max(2, decode_tp) * 16 * 4  # layers, K and V, KV heads with replicas, head_dim, fp32
    for length in (16, 17, 96, 100):
        full = length // 16 * 16
        on_prefill, on_decode, on_both, local = (prompt(length, seed) for seed in range(10, 14))
        expected = {s: reference.answer(prompt(length, s), GREEDY) for s in range(10, 14)}

        await cache_on_prefill_only(hand, live.prefill, live.decode, on_prefill)
        answer = await hand.handoff(live.prefill, live.decode, on_prefill, GREEDY)
        assert answer.tokens == expected[10]
        assert (answer.cached_tokens_prefill, answer.cached_tokens_decode) == ((length - 1) // 16 * 16, 0)
        assert answer.kv_bytes == length * token_bytes

        await hand.generate(live.decode, on_decode, GREEDY)
        answer = await hand.handoff(live.prefill, live.decode, on_decode, GREEDY)
        assert answer.tokens == expected[11]
        assert (answer.cached_tokens_prefill, answer.cached_tokens_decode) == (0, full)
        assert answer.kv_bytes == (length - full) * token_bytes

        first = await hand.handoff(live.prefill, live.decode, on_both, GREEDY)
        again = await hand.handoff(live.prefill, live.decode, on_both, GREEDY)
        assert first.tokens == again.tokens == expected[12]
        assert (again.cached_tokens_prefill, again.cached_tokens_decode) == ((length - 1) // 16 * 16, full)

        await hand.handoff(live.prefill, live.decode, local, GREEDY)
        answer = await hand.generate(live.decode, local, GREEDY)  # what the policy does when it is free to
        assert answer.tokens == expected[13]
        assert answer.cached_tokens_decode == (length - 1) // 16 * 16
