"""The life of a request between a real router and stub workers: every way it can end."""

import asyncio

import httpx
import pytest

from router.requests.output import MAX_UNREAD_PIECES
from router.requests.request import RawRequest, RawSampling
from router.testing.stub_worker import StubWorker, until
from tandem.config.spec import Disaggregation, Role, RouterSpec
from tandem.errors import RequestCancelled
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.kvcache.prefix_events import PrefixSnapshot, join_hashes
from tandem.v1 import cluster_pb2
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
PROMPT = {"model": MODEL, "prompt": "Hi"}


async def test_handoff_goes_reserve_prefill_join(cluster: Cluster) -> None:
    await cluster.openai.completions.create(**PROMPT)
    assert [kind for kind, _ in cluster.decode.received] == ["reserve", "join"]
    assert [kind for kind, _ in cluster.prefill.received] == ["prefill"]
    await cluster.settled()


async def test_first_token_does_not_wait_for_the_handoff(cluster: Cluster) -> None:
    tokens = cluster.says("abcdef")
    cluster.decode.behaviour.token_delay_s = 30
    stream = await cluster.openai.completions.create(**PROMPT, stream=True)
    first = await anext(aiter(stream))
    assert first.choices[0].text == cluster.tokenizer.decode(tokens[:1])
    await stream.close()


async def test_answer_of_one_token_never_joins(cluster: Cluster) -> None:
    first = cluster.tokenizer.decode(cluster.says("abc")[:1])
    answer = await cluster.openai.completions.create(**PROMPT, max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (first, "length")
    await until(lambda: bool(cluster.decode.cancelled))
    assert cluster.decode.frames("join") == []
    await cluster.settled()


async def test_stop_token_first_never_joins(cluster: Cluster) -> None:
    cluster.prefill.behaviour.answer = lambda prompt: [2]
    answer = await cluster.openai.completions.create(**PROMPT)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    await until(lambda: bool(cluster.decode.cancelled))


async def test_stop_string_cancels_on_the_decode_worker(cluster: Cluster) -> None:
    cluster.says("ab STOP cd")
    await cluster.openai.completions.create(**PROMPT, stop="STOP")
    await until(lambda: bool(cluster.decode.cancelled))
    assert cluster.ends("finished") == 1
    await cluster.settled()


@pytest.mark.parametrize("stage", ["reserve", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_closed_connection_cancels_wherever_the_request_is(cluster: Cluster, stage: str, stream: bool) -> None:
    cluster.says("a long answer")
    cluster.decode.behaviour.hold_reservations = stage == "reserve"
    cluster.prefill.behaviour.hold_prefills = stage == "prefill"
    cluster.decode.behaviour.token_delay_s = 0.2
    worker, kind = {
        "reserve": (cluster.decode, "reserve"),
        "prefill": (cluster.prefill, "prefill"),
        "decode": (cluster.decode, "join"),
    }[stage]
    async with httpx.AsyncClient(base_url=cluster.base_url) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "stream": stream}))
        await until(lambda: bool(worker.frames(kind)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: bool(cluster.decode.cancelled))
    if stage == "prefill":
        await until(lambda: bool(cluster.prefill.cancelled))
    await until(lambda: cluster.ends("cancelled") == 1)
    assert cluster.decode.known == set()
    await cluster.settled()


async def test_prefill_worker_lost_before_the_first_token_is_tried_again(cluster: Cluster) -> None:
    cluster.says("abc")
    cluster.prefill.behaviour.hold_prefills = True
    task = asyncio.create_task(cluster.openai.completions.create(**PROMPT))
    await until(lambda: bool(cluster.prefill.frames("prefill")))
    await cluster.prefill.kill()
    answer = await task
    assert answer.choices[0].text == "abc"
    assert cluster.decode.frames("cancel"), "the first attempt was taken off the decode worker"
    assert cluster.decode.frames("generate"), "without a prefill worker it is prefilled locally"
    assert len(set(cluster.decode.works)) == 2, "attempts have ids of their own"


async def test_new_epoch_serves_after_a_loss(cluster: Cluster) -> None:
    await cluster.decode.kill()
    await until(lambda: not cluster.app.service.ready)
    task = asyncio.create_task(cluster.openai.completions.create(**PROMPT))
    await asyncio.sleep(0.1)
    assert not task.done(), "a request waits while its pool restarts"
    fresh = StubWorker("d0", Role.DECODE, MODEL, epoch=2)
    await fresh.start()
    await cluster.list_workers(cluster.prefill, fresh)
    assert (await task).usage.completion_tokens > 0
    await fresh.kill()


class Listed(StubWorker):
    """The directory says epoch 5, the worker itself another."""

    def info(self) -> cluster_pb2.WorkerInfo:
        info = super().info()
        info.epoch = 5
        return info


async def test_worker_of_another_epoch_than_listed_is_not_used(bare: Cluster) -> None:
    worker = Listed("d9", Role.DECODE, MODEL, epoch=4)
    await worker.start()
    await bare.controller.set_workers(worker)
    await until(lambda: bare.app.dispatcher.fleet.worker("d9", 5) is not None)
    await asyncio.sleep(0.2)
    assert not bare.app.service.ready
    worker.epoch = 5
    await until(lambda: bare.app.service.ready)
    await worker.kill()


async def test_refused_reservation_goes_to_the_next_decode_worker(cluster: Cluster) -> None:
    other = StubWorker("d1", Role.DECODE, MODEL)
    await other.start()
    await cluster.list_workers(cluster.prefill, cluster.decode, other)
    cluster.decode.behaviour.refuse_reservations = 1
    await cluster.openai.completions.create(**PROMPT)
    assert len(cluster.decode.frames("reserve")) == 1
    assert len(other.frames("join")) == 1
    await cluster.settled()
    await other.kill()


async def test_refused_everywhere_waits_and_tries_again(cluster: Cluster) -> None:
    cluster.decode.behaviour.refuse_reservations = 3
    await cluster.openai.completions.create(**PROMPT)
    assert len(cluster.decode.frames("reserve")) == 4
    await cluster.settled()


async def test_controller_lost_serves_on_with_the_last_directory(cluster: Cluster) -> None:
    await cluster.controller.stop()
    await asyncio.sleep(0.1)
    assert (await cluster.openai.completions.create(**PROMPT)).usage.completion_tokens > 0


async def test_worker_that_leaves_the_directory_finishes_what_it_has(cluster: Cluster) -> None:
    cluster.says("abcdef")
    cluster.decode.behaviour.token_delay_s = 0.05
    task = asyncio.create_task(cluster.openai.completions.create(**PROMPT))
    await until(lambda: bool(cluster.decode.frames("join")))
    await cluster.controller.set_workers(cluster.prefill)
    assert (await task).choices[0].text == "abcdef"
    await until(lambda: cluster.app.dispatcher.fleet.worker("d0", 1) is None)


async def test_sixteen_streams_get_their_own_answers(cluster: Cluster) -> None:
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: [*prompt, *prompt, *prompt]
        worker.behaviour.token_delay_s = 0.002

    async def ask(number: int) -> bool:
        text = f"question {number:02}"
        chunks = [c async for c in await cluster.openai.completions.create(model=MODEL, prompt=text, stream=True)]
        return "".join(chunk.choices[0].text for chunk in chunks) == text * 3

    assert all(await asyncio.gather(*(ask(number) for number in range(16))))
    await cluster.settled()
    assert cluster.ends("finished") == 16


class TestAggregated:
    async def test_without_prefill_workers_the_decode_worker_does_all(self, bare: Cluster) -> None:
        bare.says("abc")
        await bare.list_workers(bare.decode)
        bare.decode.behaviour.cached_tokens = 1
        answer = await bare.openai.completions.create(**PROMPT)
        assert answer.choices[0].text == "abc"
        assert answer.usage.prompt_tokens_details.cached_tokens == 1
        assert [kind for kind, _ in bare.decode.received] == ["generate"]
        await bare.settled()


class TestAuto:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.AUTO)

    async def test_short_prompts_stay_local_and_long_ones_are_handed_off(self, cluster: Cluster) -> None:
        await cluster.openai.completions.create(model=MODEL, prompt=[70] * 32)
        assert cluster.prefill.received == []
        await cluster.openai.completions.create(model=MODEL, prompt=[71] * 33)
        assert len(cluster.prefill.frames("prefill")) == 1


class TestQueue:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(
            http_port=0,
            grpc_port=0,
            disaggregation=Disaggregation.ALWAYS,
            max_queued_requests=2,
            queue_timeout_s=0.3,
            max_prefill_tokens_in_flight=40,
        )

    async def test_no_worker_within_the_limit_is_a_typed_error(self, bare: Cluster) -> None:
        reply = await bare.http.post("/v1/completions", json=PROMPT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in reply.headers
        assert bare.ends("rejected") == 1

    async def test_full_queue_answers_429_at_once(self, bare: Cluster) -> None:
        waiting = [asyncio.create_task(bare.http.post("/v1/completions", json=PROMPT)) for _ in range(2)]
        await until(lambda: bare.app.dispatcher.active == 2)
        reply = await bare.http.post("/v1/completions", json=PROMPT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in reply.headers
        await asyncio.gather(*waiting)

    async def test_prefill_worker_is_given_no_more_than_its_budget(self, cluster: Cluster) -> None:
        cluster.prefill.behaviour.token_delay_s = 0.1
        body = {"model": MODEL, "prompt": [70] * 30, "max_tokens": 1}
        tasks = [asyncio.create_task(cluster.http.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: bool(cluster.prefill.frames("prefill")))
        assert len(cluster.prefill.frames("prefill")) == 1
        assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200, 200]
        await cluster.settled()

    async def test_reservation_never_granted_ends_with_kv_exhausted(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.refuse_reservations = 1000
        reply = await cluster.http.post("/v1/completions", json=PROMPT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "kv_exhausted")
        await cluster.settled()


async def test_queued_request_whose_client_leaves_is_withdrawn(bare: Cluster) -> None:
    async with httpx.AsyncClient(base_url=bare.base_url) as client:
        task = asyncio.create_task(client.post("/v1/completions", json=PROMPT))
        await until(lambda: bare.app.dispatcher.active == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: bare.app.dispatcher.active == 0)
    assert bare.ends("cancelled") == 1


class TestSlowReader:
    @pytest.fixture
    def max_model_tokens(self) -> int:
        return 2048

    async def test_reader_that_stays_away_ends_its_request(self, cluster: Cluster) -> None:
        for worker in (cluster.prefill, cluster.decode):
            worker.behaviour.answer = lambda prompt: [70] * (MAX_UNREAD_PIECES + 100)
        submitted = await cluster.app.service.submit(RawRequest(MODEL, "Hi", RawSampling()))
        await until(lambda: cluster.ends("cancelled") == 1)
        await until(lambda: bool(cluster.decode.cancelled))
        with pytest.raises(RequestCancelled, match="unread"):
            async for _ in submitted.stream:
                pass


@pytest.mark.parametrize(("cached", "wrong"), [(32, 0), (16, 16), (0, 32)])
async def test_credit_that_a_worker_does_not_honour_is_counted(cluster: Cluster, cached: int, wrong: int) -> None:
    prompt = list(range(60, 100))
    hashes = join_hashes(hash_blocks(prompt, 16, HashKey("f")))
    for worker in (cluster.prefill, cluster.decode):
        cluster.app.mirror.load(worker.worker_id, PrefixSnapshot(worker.epoch, 0, hashes))
    cluster.prefill.behaviour.cached_tokens = cached
    await cluster.openai.completions.create(model=MODEL, prompt=prompt)
    assert cluster.metric('tandem_index_credit_tokens_total{kind="given"') == 32
    assert cluster.metric('tandem_index_credit_tokens_total{kind="wrong"') == wrong
    assert cluster.metric("tandem_index_blocks ") == 2
    await cluster.settled()


async def test_a_prompt_that_is_being_computed_draws_the_next_one_like_it(cluster: Cluster) -> None:
    workers = [cluster.prefill, StubWorker("p1", Role.PREFILL, MODEL)]
    await workers[1].start()
    await cluster.list_workers(*workers, cluster.decode)
    for worker in workers:
        worker.behaviour.hold_prefills = True

    def prompts() -> list[list[tuple[int, ...]]]:
        return [[tuple(each.works[wire_id].prompt) for wire_id in each.frames("prefill")] for each in workers]

    one, another = tuple(range(20, 220)), tuple(range(120, 320))
    streams = []
    for number, prompt in enumerate((one, another, another, one), 1):
        streams.append(await cluster.app.service.submit(RawRequest(MODEL, prompt, RawSampling())))
        await until(lambda number=number: sum(map(len, prompts())) == number)  # type: ignore[misc]
    assert prompts() == [[one, one], [another, another]]
    for stream in streams:
        stream.stream.cancel()
    await workers[1].kill()


class TestStop:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, drain_timeout_s=0.05)

    async def test_an_answer_cut_off_by_the_stop_ends_with_an_error_that_says_so(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.token_delay_s = 5.0
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 40}
        whole = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        streamed = asyncio.create_task(cluster.http.post("/v1/completions", json=body | {"stream": True}))
        await until(lambda: len(cluster.decode.frames("join")) == 2)
        await cluster.app.close()
        reply = await whole
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        events = (await streamed).text
        assert "the router stopped before the answer was complete" in events
        assert cluster.ends("failed") == 2
        assert cluster.ends("cancelled") == 0
