"""Requests between a real router and stub workers: frames, streams, connections that close, epochs, timers.

What the core decides is in test_core_*.py and in the scenarios.
"""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import grpc
import httpx
import pytest

from router.requests.output import MAX_UNREAD_PIECES
from router.requests.raw_request import RawRequest, RawSampling
from router.testing.stub_worker import StubWorker, until
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import RequestCancelled
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from tandem.v1 import cluster_pb2, inference_pb2
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


@pytest.mark.parametrize(("stage", "stream"), [("prefill", True), ("decode", True), ("decode", False)])
async def test_closed_connection_cancels_before_and_during_the_answer(
    cluster: Cluster, stage: str, stream: bool
) -> None:
    cluster.says("a long answer")
    cluster.prefill.behaviour.hold_prefills = stage == "prefill"
    cluster.decode.behaviour.token_delay_s = 30
    worker, kind = (cluster.prefill, "prefill") if stage == "prefill" else (cluster.decode, "join")
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60, verify=False) as client:
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


async def test_controller_lost_serves_on_with_the_last_directory(cluster: Cluster) -> None:
    assert cluster.metric("tandem_controller_up") == 1
    await cluster.controller.stop()
    await until(lambda: cluster.metric("tandem_controller_up") == 0)
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
        create = cluster.openai.completions.create
        chunks = [c async for c in await create(model=MODEL, prompt=text, stream=True, max_tokens=3 * len(text))]
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


class TestQueue:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(
            http_port=0,
            grpc_port=0,
            disaggregation=Disaggregation.ALWAYS,
            queue_timeout_s=0.3,
        )

    async def test_no_worker_within_the_limit_is_a_typed_error(self, bare: Cluster) -> None:
        reply = await bare.http.post("/v1/completions", json=PROMPT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in reply.headers
        assert bare.ends("rejected") == 1


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

    async def test_so_do_streams_of_grpc_and_of_the_open_inference_protocol(self, cluster: Cluster) -> None:
        cluster.decode.behaviour.token_delay_s = 5.0
        sampling = inference_pb2.SamplingParams(max_tokens=40)
        generate = cluster.inference.Generate(
            inference_pb2.GenerateRequest(model=MODEL, prompt="Hi", sampling=sampling)
        )
        tensor = oip.ModelInferRequest.InferInputTensor(
            name="text_input",
            datatype="BYTES",
            shape=[1],
            contents=oip.InferTensorContents(bytes_contents=[b"Hi"]),
        )
        max_tokens = {"max_tokens": oip.InferParameter(int64_param=40)}
        asked = oip.ModelInferRequest(model_name=MODEL, inputs=[tensor], parameters=max_tokens)
        infer = oip_grpc.GRPCInferenceServiceStub(cluster.channel).ModelStreamInfer(iter([asked]))

        async def last_of(call: AsyncIterable[Any]) -> Any:
            last = None
            async for each in call:
                last = each
            return last

        both = [asyncio.create_task(last_of(call)) for call in (generate, infer)]
        await until(lambda: len(cluster.decode.frames("join")) == 2)
        await cluster.app.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await both[0]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the router stopped before the answer was complete" in (caught.value.details() or "")
        assert "the router stopped before the answer was complete" in (await both[1]).error_message
