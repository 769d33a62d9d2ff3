"""Predictions through a real router and real workers that speculate: the answer without them, in fewer steps."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from router.requests.output import Usage
from router.requests.raw_request import RawRequest, RawSampling
from router.requests.recording.replay import Replay, ReplayReport
from router.service import RouterService
from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tandem.v1 import cluster_pb2
from tests.conftest import Reference

VOCAB = 300
TOKENS = 300
ENGINE = EngineSpec.model_validate(
    {
        "kv_blocks": 600,
        "max_step_tokens": 100,
        "speculation": "lookup",
        "speculation_tokens": 1,
        "speculation_adaptive": False,
    }
)
LETTERS = "bcdefghijklm"  # no two of them are one token


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, seed=1, scale=2.0)


async def test_the_official_client_gets_the_answer_without_it_and_how_much_of_it_was_right(
    routed: Callable[..., Any], tiny: Path
) -> None:
    tokenizer = Tokenizer.load(tiny)
    bias = {str(token): 30 for letter in LETTERS for token in tokenizer.encode(letter, add_special_tokens=False)}
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say some letters."}],
        "max_tokens": 60,
        "logit_bias": bias,
        "seed": 3,
    }
    async with routed(tiny, prefill=1, decode=1, engine=ENGINE) as live:
        url = f"http://127.0.0.1:{live.app.http_port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create  # its overloads know no request from a dict

            async def answer(**more: Any) -> tuple[list[str], Any]:
                got = await create(**(asked | more))
                return [choice.message.content or "" for choice in got.choices], got.usage

            for temperature in (0, 1):
                asked["temperature"] = temperature
                (text,), usage = await answer()
                assert len(text) >= 60, "letters, one token each"
                assert usage.completion_tokens_details is None
                (same,), usage = await answer(prediction={"type": "content", "content": text})
                assert same == text
                assert usage.completion_tokens_details.accepted_prediction_tokens >= 20
                (same,), usage = await answer(prediction={"type": "content", "content": "0123456789" * 6})
                assert same == text
                assert usage.completion_tokens_details.accepted_prediction_tokens == 0

            (first, second), usage = await answer(n=2, prediction={"type": "content", "content": text})
            assert first == text
            assert second != text, "another seed"
            assert usage.completion_tokens_details.accepted_prediction_tokens >= 20
            parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]
            stream = await create(
                **asked,
                prediction={"type": "content", "content": parts},
                stream=True,
                stream_options={"include_usage": True},
            )
            events = [event async for event in stream]
            assert "".join(each.choices[0].delta.content or "" for each in events if each.choices) == text
            assert events[-1].usage.completion_tokens_details.accepted_prediction_tokens >= 20


@dataclass
class Predicted:
    """A request whose prediction is its answer."""

    prompt: list[int]
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None

    async def read(self, service: RouterService) -> None:
        sampling = RawSampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        raw = RawRequest("tiny", tuple(self.prompt), sampling, prediction=tuple(self.expected))
        submitted = await service.submit(raw)
        async for pieces in submitted.stream:
            self.tokens += [token.token_id for piece in pieces for token in piece.tokens]
        assert submitted.stream.final is not None
        self.usage = submitted.stream.final.usage


def predicted(reference: Reference, count: int) -> list[Predicted]:
    found: list[Predicted] = []
    seed = 0
    while len(found) < count:
        seed += 1
        prompt = random_prompt(40, VOCAB, seed)
        try:
            answer = reference.answer(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS))
        except ValueError:
            continue  # a near tie
        found.append(Predicted(prompt, answer))
    return found


def replayed(folder: Path) -> ReplayReport:
    (recording,) = folder.glob("*.jsonl")
    with recording.open("rb") as source:
        return Replay().run(source)


@pytest.mark.parametrize("leaves_by", ["move", "death"])
@pytest.mark.slow
async def test_a_worker_that_takes_a_request_over_has_its_prediction_too(
    routed: Callable[..., Any],
    tiny: Path,
    tmp_path: Path,
    reference_for: Callable[[Path], Reference],
    leaves_by: str,
) -> None:
    """Most of its tokens come from the second worker, and most of those are proposed from the prediction."""
    asked = predicted(reference_for(tiny), 3)
    always = Disaggregation.ALWAYS
    spec = RouterSpec(http_port=0, grpc_port=0, record=str(tmp_path), disaggregation=always)
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE, router=spec) as live:
        workers = {worker.key.worker_id: worker for worker in live.app.dispatcher.fleet.workers()}
        reading = [asyncio.create_task(each.read(live.app.service)) for each in asked]
        await until(lambda: any(each.tokens for each in asked))
        leaving = max(("decode-0", "decode-1"), key=lambda name: workers[name].account.requests)
        rank = live.workers.live[leaving].ranks[0]
        rank.send_signal(signal.SIGSTOP)  # or it could end all that it has before it is told
        if leaves_by == "move":
            info = cluster_pb2.WorkerInfo()
            info.CopyFrom(live.workers.directory.workers[leaving])
            info.drain = cluster_pb2.DRAIN_MOVE
            await live.workers.directory.put(info)
            await until(lambda: workers[leaving].drain == cluster_pb2.DRAIN_MOVE)
            rank.send_signal(signal.SIGCONT)
        else:
            rank.kill()
        async with asyncio.timeout(120):
            await asyncio.gather(*reading)
        metrics = live.app.metrics.render().decode()
        assert ("tandem_moves_total{" if leaves_by == "move" else "tandem_retries_total{") in metrics
    for each in asked:
        assert each.tokens == each.expected
        usage = each.usage
        assert usage is not None
        assert usage.accepted_prediction_tokens > 0.3 * TOKENS
        assert usage.rejected_prediction_tokens < 0.1 * TOKENS
    report = replayed(tmp_path)
    assert (report.first, report.skipped, report.runs) == (None, {}, len(asked))
