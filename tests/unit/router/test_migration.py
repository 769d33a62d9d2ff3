"""A request whose worker is lost or whose handoff fails goes on elsewhere, and its client cannot tell: the wire.

Where it goes and what counts: test_core_attempts.py.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from router.requests.output import Final
from router.requests.raw_request import RawRequest, RawSampling
from router.testing.stub_worker import StubWorker, script, until
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
PROMPT = {"model": MODEL, "prompt": "Hi"}
EOS = 2
TEXT = "a long answer"
Spare = tuple[StubWorker, StubWorker]  # a prefill and a decode worker


@pytest.fixture
async def spare(cluster: Cluster) -> AsyncIterator[Spare]:
    """A second prefill and a second decode worker, less wanted than the first: by name."""
    workers = StubWorker("p1", Role.PREFILL, MODEL), StubWorker("d1", Role.DECODE, MODEL)
    for worker in workers:
        await worker.start()
    await cluster.list_workers(cluster.prefill, cluster.decode, *workers)
    yield workers
    for worker in workers:
        await worker.kill()


def says(cluster: Cluster, text: str, *others: StubWorker) -> list[int]:
    """All of them answer with `text`, from wherever it has come to."""
    tokens: list[int] = cluster.says(text)
    for worker in others:
        worker.behaviour.answer = script(tokens)
    return tokens


def prompt_of(worker: StubWorker, attempt: int) -> list[int]:
    return next(list(work.prompt) for wire_id, work in worker.works.items() if wire_id.endswith(f".{attempt}"))


async def run(cluster: Cluster, max_tokens: int | None = None) -> tuple[list[int], Final]:
    """Tokens and end of one request."""
    submitted = await cluster.app.service.submit(RawRequest(MODEL, "Hi", RawSampling(max_tokens=max_tokens)))
    tokens = [token.token_id async for pieces in submitted.stream for piece in pieces for token in piece.tokens]
    assert submitted.stream.final is not None
    return tokens, submitted.stream.final


class TestHandoffFailsAfterTheFirstToken:
    async def test_goes_on_with_other_workers_from_prompt_and_token(
        self, cluster: Cluster, spare: Spare, caplog: pytest.LogCaptureFixture
    ) -> None:
        p1, d1 = spare
        tokens = says(cluster, TEXT, p1, d1)
        cluster.decode.behaviour.fail_handoffs = 1
        answer = await cluster.openai.completions.create(**PROMPT, max_tokens=9, seed=5)
        assert answer.choices[0].text == cluster.tokenizer.decode(tokens[:9])
        assert answer.usage.completion_tokens == 9
        prompt = prompt_of(cluster.decode, 1)
        for worker in spare:
            (work,) = worker.works.values()
            assert list(work.prompt) == [*prompt, tokens[0]]
            assert (work.sampling.max_tokens, work.sampling.seed) == (8, 5)
            assert work.answer_tokens == 1
        assert answer.usage.prompt_tokens == len(prompt)
        assert cluster.metric('tandem_retries_total{code="handoff_failed"') == 1
        (told,) = [vars(each) for each in caplog.records if each.message == "handoff failed"]
        assert (told["prefill"], told["decode"]) == (cluster.prefill.worker_id, cluster.decode.worker_id)
        assert cluster.metric(f'tandem_handoff_failures_total{{cause="{told["cause"]}"') == 1
        assert cluster.ends("finished") == cluster.metric("tandem_requests_total") == 1
        await cluster.settled()

    async def test_late_words_about_the_old_attempt_are_dropped(self, cluster: Cluster, spare: Spare) -> None:
        tokens = says(cluster, TEXT, *spare)
        cluster.decode.behaviour.fail_handoffs = 1
        cluster.decode.behaviour.talk_after_failure = True
        cluster.decode.behaviour.token_delay_s = spare[1].behaviour.token_delay_s = 0.01
        assert (await run(cluster))[0] == tokens
        await cluster.settled()


class TestDecodeWorkerLost:
    async def test_goes_on_with_another_in_mid_stream(self, cluster: Cluster, spare: Spare) -> None:
        p1, d1 = spare
        tokens = says(cluster, TEXT, p1, d1)
        cluster.decode.behaviour.token_delay_s = 0.05
        stream = await cluster.openai.completions.create(**PROMPT, stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            if len(texts) == 3:
                await cluster.decode.kill()
        assert "".join(texts) == TEXT
        given = len(prompt_of(d1, 2)) - len(prompt_of(cluster.decode, 1))
        assert given >= 3
        assert prompt_of(d1, 2) == prompt_of(p1 if p1.works else cluster.prefill, 2)
        assert prompt_of(d1, 2)[-given:] == tokens[:given]
        assert cluster.metric('tandem_retries_total{code="worker_lost"') == 1
        await cluster.settled()


class TestBreaksAfterEverySecondToken:
    """The decode worker is lost after each token it gives, so attempts end anywhere in an answer."""

    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, max_migrations=100)

    @pytest.mark.parametrize(
        ("text", "options"), [("a STO PS STOP", {"stop": ["STOP", "OPS"]}), (TEXT, {"logprobs": 2})]
    )
    async def test_the_client_cannot_tell(self, cluster: Cluster, text: str, options: Any) -> None:
        options = {"max_tokens": len(cluster.says(text))} | options
        whole = await cluster.openai.completions.create(**PROMPT, **options)
        cluster.decode.behaviour.fail_decodes = 1000
        broken = await cluster.openai.completions.create(**PROMPT, **options)
        assert broken.choices == whole.choices
        assert broken.usage == whole.usage
        assert len(cluster.decode.frames("reserve")) == 1 + (whole.usage.completion_tokens + 1) // 2
        await cluster.settled()


class TestNoMigrations:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, max_migrations=0)

    async def test_loss_in_mid_stream_is_a_typed_error(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.token_delay_s = 0.1
        stream = await cluster.openai.completions.create(**PROMPT, stream=True)
        await anext(aiter(stream))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.decode.kill()
        with pytest.raises(openai.APIError, match="d0 was lost") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "worker_lost"
        assert cluster.ends("failed") == 1

    async def test_loss_before_the_answer_begins_has_its_http_status(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.token_delay_s = 30
        task = asyncio.create_task(cluster.http.post("/v1/completions", json=PROMPT))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.decode.kill()
        reply = await task
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        assert int(reply.headers["retry-after"]) >= 1
