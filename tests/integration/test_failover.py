"""Whole workers are killed or frozen under 32 streams of a real router: every answer is what it would have been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from router.requests.output import OutToken
from router.requests.raw_request import RawRequest, RawSampling
from router.service import RouterService
from router.testing.stub_worker import until
from router.texts.detokenizer import Detokenizer, TokenDecoder
from router.workers.fleet import Worker
from router.workers.health import HealthState
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference
from tests.integration.conftest import Routed, StartRouted

VOCAB = 300
MAX_TOKENS = 60
STREAMS = 32
ENGINE = EngineSpec(kv_blocks=800, max_step_tokens=100)  # small steps, so that prompts go in several chunks
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": MAX_TOKENS}
SOAK = bool(os.environ.get("TANDEM_SOAK"))
ROUNDS = 20 if SOAK else 1
GAP_S = 3.0 if SOAK else 15.0  # here, other tests may have both cores
# 5.01 s measured. The rest is the machine's noise; tests/unit/router/test_health.py tests the exact time.
OUT_WITHIN_S = 5.0 + (0.1 if SOAK else 25.0)


@dataclass
class Ask:
    """A prompt, how to answer it, and what has to come of it."""

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    logprobs: list[float] | None = None
    stop: str | None = None
    text: str | None = None  # before the stop string


@dataclass
class Stream:
    """What did come of it."""

    tokens: list[OutToken] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    longest_gap_s: float = 0.0

    async def read(self, service: RouterService, ask: Ask) -> None:
        stop = () if ask.stop is None else (ask.stop,)
        logprobs = None if ask.logprobs is None else 1
        sampling = RawSampling(**ask.sampling, stop=stop, logprobs=logprobs)
        submitted = await service.submit(RawRequest("tiny", tuple(ask.prompt), sampling))
        heard_s = None
        async for pieces in submitted.stream:
            now_s = time.monotonic()
            if heard_s is not None:
                self.longest_gap_s = max(self.longest_gap_s, now_s - heard_s)
            heard_s = now_s
            for piece in pieces:
                self.text += piece.text
                self.tokens += piece.tokens
        assert submitted.stream.final is not None
        self.reason = submitted.stream.final.reason

    def assert_is(self, ask: Ask) -> None:
        ids = [token.token_id for token in self.tokens]
        if ask.stop is None:
            assert ids == ask.tokens
            assert self.reason == "length"
        else:
            assert ids == ask.tokens[: len(ids)]
            assert (self.text, self.reason) == (ask.text, "stop")
        if ask.logprobs is not None:
            assert [token.logprob for token in self.tokens] == pytest.approx(ask.logprobs, abs=1e-3)


def unbroken_text(decoder: TokenDecoder, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    detokenizer = Detokenizer(decoder, prompt)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def asks_for(reference: Reference, decoder: TokenDecoder, seed: int = 0) -> list[Ask]:
    """Greedy ones with logprobs and sampled ones. Half of all end at a stop string, which is the middle half of the
    answer: wherever in there a break comes, the string lies across it. Seeds 1,000 apart share no prompt."""
    asks: list[Ask] = []
    while len(asks) < STREAMS:
        seed += 1
        number = len(asks)
        sampling = SEEDED if number % 2 else GREEDY
        prompt = random_prompt(100 + 5 * number, VOCAB, seed)
        try:
            tokens = reference.answer(prompt, SamplingParams(**sampling))
        except ValueError:
            continue  # a near tie
        ask = Ask(prompt, sampling, tokens)
        if number % 4 >= 2:
            text = unbroken_text(decoder, prompt, tokens)
            ask.stop = text[len(text) // 4 : 3 * len(text) // 4]
            ask.text = text[: text.index(ask.stop)]
        elif number % 2 == 0:
            rows = reference.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
            ask.logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        asks.append(ask)
    return asks


def workers_of(live: Routed, role: Role) -> list[Worker]:
    found: list[Worker] = live.app.dispatcher.fleet.ready("tiny", role)
    return found


def retries(live: Routed) -> float:
    lines = live.app.metrics.render().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tandem_retries_total{"))


async def ask_until_prefilling(
    live: Routed, fresh: Iterator[list[Ask]]
) -> tuple[list[tuple[Stream, Ask]], list[asyncio.Task[None]], Worker]:
    """A prefill worker is stopped with prompts of its own: it may compute all it has between two looks at it."""
    while True:
        pairs = [(Stream(), ask) for ask in next(fresh)]
        running = [asyncio.create_task(stream.read(live.app.service, ask)) for stream, ask in pairs]
        await until(lambda pairs=pairs: any(stream.tokens for stream, _ in pairs), 30.0)  # type: ignore[misc]
        victim = max(workers_of(live, Role.PREFILL), key=lambda worker: worker.account.prefill_tokens)
        rank = live.workers.live[victim.key.worker_id].ranks[0]
        rank.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what it had sent has arrived
        if victim.account.prefill_tokens:
            return pairs, running, victim
        rank.send_signal(signal.SIGCONT)
        await asyncio.gather(*running)


async def kill_one_under_all(live: Routed, fresh: Iterator[list[Ask]], role: Role) -> list[float]:
    """The worker with most to do dies. `fresh`: their prompts are in no cache. Returns every stream's longest gap."""
    before = retries(live)
    if role is Role.PREFILL:
        pairs, running, victim = await ask_until_prefilling(live, fresh)
    else:
        pairs = [(Stream(), ask) for ask in next(fresh)]
        running = [asyncio.create_task(stream.read(live.app.service, ask)) for stream, ask in pairs]
        await until(lambda: sum(len(stream.tokens) > MAX_TOKENS // 3 for stream, _ in pairs) >= STREAMS // 2, 30.0)
        victim = max(workers_of(live, role), key=lambda worker: worker.account.requests)
    live.workers.live[victim.key.worker_id].kill()
    async with asyncio.timeout(60.0):
        await asyncio.gather(*running)
    for stream, ask in pairs:
        stream.assert_is(ask)
    assert retries(live) > before, "nothing was disturbed"
    await live.workers.restart(victim.key.worker_id)
    await until(lambda: len(workers_of(live, role)) == 2, 30.0)
    return [stream.longest_gap_s for stream, _ in pairs]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.acceptance(1, here="32 streams, one kill", soak="20 kills")
async def test_every_stream_goes_on_exactly_when_a_worker_is_killed(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    async with routed(model_dir, prefill=2, decode=2, engine=ENGINE) as live:
        reference, decoder = reference_for(model_dir), live.app.service.models.by_name["tiny"].tokenizer
        # Prompts that no worker has cached, or a prefill worker could be done before it is killed.
        fresh = (asks_for(reference, decoder, seed=1000 * number) for number in count())
        for role in (Role.DECODE, Role.PREFILL):
            gaps: list[float] = []
            for _ in range(ROUNDS):
                gaps += await kill_one_under_all(live, fresh, role)
            gaps.sort()
            p99_s = gaps[round(0.99 * (len(gaps) - 1))]
            with capsys.disabled():
                figures = {"streams": len(gaps), "p50_s": gaps[len(gaps) // 2], "p99_s": p99_s, "longest_s": gaps[-1]}
                print(json.dumps({"figure": f"failover.{role.value}_gap"} | figures))
            assert p99_s <= GAP_S


@pytest.mark.parametrize("role", [Role.DECODE, pytest.param(Role.PREFILL, marks=pytest.mark.soak_only)])
@pytest.mark.slow
@pytest.mark.acceptance(3, here="a decode worker, out after 5.0 s", soak="both roles, within 5.1 s")
async def test_a_frozen_engine_is_out_and_back_after_a_canary(
    routed: StartRouted, reference_for: Callable[[Path], Reference], tmp_path: Path, role: Role
) -> None:
    """Its rank hangs; its service and agents still answer, and every connection stands."""
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    counts = {"prefill": 1, "decode": 2} if role is Role.DECODE else {"prefill": 2, "decode": 1}
    async with routed(model_dir, **counts, engine=ENGINE) as live:
        fleet = live.app.dispatcher.fleet
        asks = asks_for(reference_for(model_dir), live.app.service.models.by_name["tiny"].tokenizer)
        streams = [Stream() for _ in asks]
        pairs = list(zip(streams, asks, strict=True))
        running = [asyncio.create_task(stream.read(live.app.service, ask)) for stream, ask in pairs]
        await until(lambda: any(len(stream.tokens) > 5 for stream in streams), 30.0)
        victim = max(workers_of(live, role), key=lambda worker: worker.account.requests)
        process = live.workers.live[victim.key.worker_id]
        process.ranks[0].send_signal(signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            await until(lambda: fleet.health.state(victim.key) is HealthState.EJECTED)
            assert victim not in workers_of(live, role)
            out_s = time.monotonic() - frozen_s
            async with asyncio.timeout(60.0):
                await asyncio.gather(*running)
            assert victim.link.ready, "its port answered all the while"
        finally:
            process.ranks[0].send_signal(signal.SIGCONT)
        print(json.dumps({"figure": f"failover.frozen_{role.value}_out_s", "value": out_s}))
        assert out_s <= OUT_WITHIN_S
        for stream, ask in pairs:
            stream.assert_is(ask)
        await until(lambda: victim in workers_of(live, role))
        again = Stream()
        await again.read(live.app.service, asks[0])
        again.assert_is(asks[0])
