"""A request whose worker is lost or whose handoff fails goes on elsewhere, and its client cannot tell."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from router.requests.output import Final
from router.requests.request import RawRequest, RawSampling
from router.testing.stub_worker import StubWorker, script, until
from tandem.config.spec import Disaggregation, Role, RouterSpec
from tandem.errors import ErrorCode, TandemError
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
    async def test_goes_on_with_other_workers_from_prompt_and_token(self, cluster: Cluster, spare: Spare) -> None:
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
        assert cluster.ends("finished") == cluster.metric("tandem_requests_total") == 1
        await cluster.settled()

    async def test_the_other_side_is_told(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.fail_handoffs = 1
        cluster.prefill.behaviour.hold_acknowledgements = True
        await run(cluster)
        await until(lambda: any(wire_id.endswith(".1") for wire_id in cluster.prefill.cancelled))
        await cluster.settled()

    async def test_without_another_prefill_worker_the_decode_worker_prefills_it(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.decode.behaviour.fail_handoffs = 1000
        assert (await run(cluster))[0] == tokens
        assert [kind for kind, _ in cluster.decode.received] == ["reserve", "join", "generate"]
        assert cluster.metric('tandem_placements_total{model="tiny",reason="local_prefill_failed"}') == 1
        await cluster.settled()

    async def test_prefill_worker_lost_before_the_blocks_are_there(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.prefill.behaviour.hold_acknowledgements = cluster.decode.behaviour.hold_joins = True
        task = asyncio.create_task(run(cluster))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.prefill.kill()
        assert (await task)[0] == tokens
        assert any(wire_id.endswith(".1") for wire_id in cluster.decode.cancelled)
        await cluster.settled()

    async def test_prefill_worker_lost_after_the_blocks_were_there_is_no_matter(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.prefill.behaviour.hold_acknowledgements = True
        cluster.decode.behaviour.token_delay_s = 0.02
        task = asyncio.create_task(run(cluster))
        await until(lambda: bool(cluster.decode.frames("join")))
        await asyncio.sleep(0.05)
        await cluster.prefill.kill()
        assert (await task)[0] == tokens
        assert cluster.metric("tandem_retries_total") == 0

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

    async def test_waits_for_its_next_life_when_there_is_no_other(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.decode.behaviour.token_delay_s = 0.05
        task = asyncio.create_task(run(cluster))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.decode.kill()
        await asyncio.sleep(0.1)
        fresh = StubWorker("d0", Role.DECODE, MODEL, epoch=2)
        fresh.behaviour.answer = script(tokens)
        await fresh.start()
        await cluster.list_workers(cluster.prefill, fresh)
        assert (await task)[0] == tokens
        await cluster.settled()
        await fresh.kill()

    async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.token_delay_s = 0.05
        async with httpx.AsyncClient(base_url=cluster.base_url) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=PROMPT))
            await until(lambda: bool(cluster.decode.frames("join")))
            await cluster.decode.kill()
            await until(lambda: cluster.metric("tandem_retries_total") == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: cluster.ends("cancelled") == 1)
        await cluster.settled()


class TestBreaksAfterEverySecondToken:
    """The decode worker is lost after each token it gives, so attempts end anywhere in an answer."""

    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, max_migrations=100)

    @pytest.mark.parametrize(
        ("text", "options"),
        [
            ("xx STOP yy", {"stop": "STOP"}),
            ("xxx STOP yy", {"stop": "STOP"}),
            ("a STO PS STOP", {"stop": ["STOP", "OPS"]}),
            ("é😀 and ü", {}),
            ("xé😀 and ü", {}),
            (TEXT, {"logprobs": 2}),
            *((TEXT, {"max_tokens": limit}) for limit in (1, 2, 3, 4, 5)),
        ],
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

    async def test_chat_with_logprobs(self, cluster: Cluster) -> None:
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
        ask["max_tokens"] = len(cluster.says(TEXT))
        whole = await cluster.openai.chat.completions.create(**ask)
        cluster.decode.behaviour.fail_decodes = 1000
        broken = await cluster.openai.chat.completions.create(**ask)
        assert broken.choices == whole.choices
        assert broken.usage == whole.usage

    @pytest.mark.parametrize("length", [2, 3, 4])
    async def test_an_answer_that_was_whole_is_not_continued(self, cluster: Cluster, length: int) -> None:
        tokens = [*cluster.says("abcdef")[: length - 1], EOS]
        for worker in (cluster.prefill, cluster.decode):
            worker.behaviour.answer = script(tokens)
        cluster.decode.behaviour.fail_decodes = 1000
        given, final = await run(cluster)
        assert given == tokens
        assert final.reason == "stop"
        assert len(cluster.decode.frames("reserve")) == (length + 1) // 2
        await cluster.settled()

    async def test_times_and_counts_are_of_the_whole_answer(self, cluster: Cluster) -> None:
        answer_tokens = len(cluster.says(TEXT))
        cluster.prefill.behaviour.cached_tokens = cluster.decode.behaviour.cached_tokens = 1
        cluster.prefill.behaviour.token_delay_s = 0.01
        cluster.decode.behaviour.fail_decodes = 1000
        _, final = await run(cluster, answer_tokens)
        line, attempts = final.timeline, len(cluster.decode.frames("join"))
        assert attempts == answer_tokens // 2
        assert line.ttft_s == pytest.approx(line.queue_s + line.prefill_s)
        assert line.ttft_s < line.decode_s <= line.total_s
        assert line.handoff_s < line.decode_s
        assert line.kv_blocks_moved == attempts, "every attempt moved one"
        assert (line.prefill_worker, line.decode_worker) == ("p0", "d0")
        assert final.usage.cached_tokens == line.cached_tokens_decode == 1


class TestBounds:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        always = Disaggregation.ALWAYS
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, max_migrations=2, queue_timeout_s=0.5)

    async def test_so_many_migrations_and_then_a_typed_error(self, cluster: Cluster) -> None:
        tokens = cluster.says(TEXT)
        cluster.decode.behaviour.fail_decodes = 1000
        stream = await cluster.openai.completions.create(**PROMPT, stream=True)
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert caught.value.code == "worker_lost"
        assert "".join(texts) == cluster.tokenizer.decode(tokens[:6]), "three attempts of two tokens"
        assert cluster.metric("tandem_retries_total") == 2
        assert cluster.ends("failed") == 1
        await cluster.settled()

    async def test_the_wait_of_a_broken_answer_begins_at_the_break(self, cluster: Cluster, spare: Spare) -> None:
        tokens = says(cluster, TEXT, *spare)
        cluster.decode.behaviour.token_delay_s = 0.1
        task = asyncio.create_task(run(cluster))
        await asyncio.sleep(0.7)  # longer than a request may wait
        await cluster.decode.kill()
        assert (await task)[0] == tokens

    async def test_a_broken_answer_without_a_worker_fails_and_is_not_called_refused(self, cluster: Cluster) -> None:
        cluster.says(TEXT)
        cluster.decode.behaviour.token_delay_s = 0.1
        task = asyncio.create_task(run(cluster))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.decode.kill()
        with pytest.raises(TandemError) as caught:
            await task
        assert caught.value.code is ErrorCode.NO_WORKER
        assert (cluster.ends("failed"), cluster.ends("rejected")) == (1, 0)
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
        cluster.decode.behaviour.token_delay_s = 0.2
        task = asyncio.create_task(cluster.http.post("/v1/completions", json=PROMPT))
        await until(lambda: bool(cluster.decode.frames("join")))
        await cluster.decode.kill()
        reply = await task
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        assert int(reply.headers["retry-after"]) >= 1
