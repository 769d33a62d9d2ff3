"""Admission from the outside: what clients are told when there is more than the workers can do."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import pytest

from router.testing.stub_worker import StubWorker, until
from tandem.config.spec import ClassSpec, Disaggregation, Role, RouterSpec
from tandem.errors import DeadlineExceeded, InputError, OverloadedError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import worker_pb2
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
SLO_S = 0.5
PROMPT_TOKENS = 20
CLASSES = (
    ClassSpec(name="interactive"),
    ClassSpec(name="urgent", ttft_slo_s=SLO_S),
    ClassSpec(name="batch", batch=True),
)


class OneAtATime(StubWorker):
    """Prefills one prompt after the other, as an engine does, each in `token_delay_s`."""

    def __init__(self, worker_id: str, role: Role, model: str) -> None:
        super().__init__(worker_id, role, model)
        self._engine = asyncio.Lock()
        self.prompts: list[Sequence[int]] = []

    async def _prefill(self, session: Any, work: worker_pb2.Work) -> None:
        async with self._engine:
            self.prompts.append(tuple(work.prompt))
            await super()._prefill(session, work)


@pytest.fixture
def spec() -> RouterSpec:
    return RouterSpec(
        http_port=0,
        grpc_port=0,
        disaggregation=Disaggregation.ALWAYS,
        classes=CLASSES,
        max_prefill_tokens_in_flight=2 * PROMPT_TOKENS,
    )


class Slow(NamedTuple):
    """A router before a prefill worker that serves twenty prompts per second, two of them at a time."""

    cluster: Cluster
    prefill: OneAtATime


@pytest.fixture
async def slow(bare: Cluster) -> AsyncIterator[Slow]:
    prefill = OneAtATime("p1", Role.PREFILL, MODEL)
    prefill.behaviour.token_delay_s = 0.05
    bare.decode.behaviour.token_delay_s = 0.001
    await prefill.start()
    await bare.list_workers(prefill, bare.decode)
    yield Slow(bare, prefill)
    await prefill.kill()


def body(first: int = 70, max_tokens: int = 1) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [first] * PROMPT_TOKENS, "max_tokens": max_tokens}


def post(cluster: Cluster, headers: dict[str, str], **kwargs: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(cluster.http.post("/v1/completions", json=body(**kwargs), headers=headers))


def generate(cluster: Cluster, headers: dict[str, str], timeout_s: float | None = None, max_tokens: int = 1) -> Any:
    request = pb.GenerateRequest(model=MODEL, sampling=pb.SamplingParams(max_tokens=max_tokens))
    request.token_ids.ids.extend([70] * PROMPT_TOKENS)
    return cluster.inference.Generate(request, metadata=tuple(headers.items()), timeout=timeout_s)


async def read(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def at_rest(cluster: Cluster) -> None:
    """No request is anywhere, and no worker has anything of one."""
    await cluster.settled()
    for worker in (cluster.prefill, cluster.decode):
        await until(lambda worker=worker: not worker.known)  # type: ignore[misc]


# ---- refusals


async def test_too_long_a_wait_is_refused_at_once_with_the_time_until_it_fits(slow: Slow) -> None:
    flood = [post(slow.cluster, {}) for _ in range(40)]
    await until(lambda: len(slow.prefill.prompts) >= 8)
    reply = await post(slow.cluster, {"x-tandem-priority": "urgent", "x-tandem-tenant": "other"})
    assert reply.status_code == 200, "another class has a share of its own"
    replies = await asyncio.gather(*(post(slow.cluster, {"x-tandem-priority": "urgent"}) for _ in range(40)))
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(refused) > 10
    assert all(reply.json()["error"]["code"] == "overloaded" for reply in refused)
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert slow.cluster.metric('tandem_admission_refusals_total{class="urgent",reason="slo"}') == len(refused)
    drained_per_s = slow.cluster.metric('tandem_drain_tokens_per_second{model="tiny"}')
    assert 0 < drained_per_s < 520, "400, or less where the machine is busy"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await at_rest(slow.cluster)


async def test_grpc_refusal_says_when_to_come_back(slow: Slow) -> None:
    flood = [asyncio.create_task(read(generate(slow.cluster, {"x-tandem-priority": "urgent"}))) for _ in range(40)]
    await until(lambda: len(slow.prefill.prompts) >= 8)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(slow.cluster, {"x-tandem-priority": "urgent"}))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_from_rpc(caught.value)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    await asyncio.gather(*flood, return_exceptions=True)
    await at_rest(slow.cluster)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tandem-priority", "royal"),
        ("x-tandem-tenant", ""),
        ("x-tandem-tenant", "a b"),
        ("x-tandem-tenant", "x" * 65),
        ("x-request-timeout-s", "0"),
        ("x-request-timeout-s", "-1"),
        ("x-request-timeout-s", "nan"),
        ("x-request-timeout-s", "inf"),
        ("x-request-timeout-s", "1e3"),
        ("x-request-timeout-s", "86401"),
        ("x-request-timeout-s", "soon"),
    ],
)
async def test_bad_terms_are_refused_by_name(cluster: Cluster, header: str, value: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        reply = await cluster.http.post(path, json={}, headers={header: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, header)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(cluster, {header: value}))
    error = error_from_rpc(caught.value)
    assert isinstance(error, InputError)
    assert error.field == header
    assert cluster.ends("rejected") == 4


# ---- fairness


async def test_a_tenants_flood_does_not_hold_up_another_tenant(slow: Slow) -> None:
    flood = [post(slow.cluster, {"x-tandem-tenant": "flood"}, first=80) for _ in range(60)]
    await until(lambda: len(slow.prefill.prompts) >= 2)
    quiet = [post(slow.cluster, {"x-tandem-tenant": "quiet"}, first=90) for _ in range(5)]
    assert all(reply.status_code == 200 for reply in await asyncio.gather(*quiet))
    mixed = [prompt[0] for prompt in slow.prefill.prompts]
    begin, end = mixed.index(90), len(mixed) - mixed[::-1].index(90)
    assert mixed[begin:end].count(80) <= 6, "turn by turn, not behind those that came before"
    assert len(mixed) < 30
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await at_rest(slow.cluster)


async def test_batch_waits_for_everybody_else(slow: Slow) -> None:
    batch = [post(slow.cluster, {"x-tandem-priority": "batch"}, first=80) for _ in range(10)]
    await until(lambda: len(slow.prefill.prompts) == 1)
    others = [post(slow.cluster, {}, first=90) for _ in range(10)]
    assert {reply.status_code for reply in await asyncio.gather(*others, *batch)} == {200}
    order = [prompt[0] for prompt in slow.prefill.prompts]
    last = len(order) - order[::-1].index(90)
    assert order[:last].count(80) <= 2, "only those that were dispatched before the first of them came"
    await at_rest(slow.cluster)


async def test_a_long_batch_prefill_gives_way_and_is_done_later(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    long = {"model": MODEL, "prompt": [80] * 10 * PROMPT_TOKENS, "max_tokens": 4}
    batch = asyncio.create_task(cluster.http.post("/v1/completions", json=long, headers={"x-tandem-priority": "batch"}))
    await until(lambda: len(cluster.prefill.frames("prefill")) == 1)
    cluster.prefill.behaviour.hold_prefills = False
    assert (await post(cluster, {})).status_code == 200
    assert cluster.prefill.frames("cancel")[0] == cluster.prefill.frames("prefill")[0]
    assert (await batch).status_code == 200
    await at_rest(cluster)


# ---- deadlines


def stop_at(cluster: Cluster, stage: str) -> None:
    cluster.prefill.behaviour.hold_prefills = stage == "prefill"
    cluster.prefill.behaviour.hold_acknowledgements = stage == "handoff"
    cluster.decode.behaviour.hold_reservations = stage == "reserve"
    cluster.decode.behaviour.hold_joins = stage == "handoff"
    cluster.decode.behaviour.token_delay_s = 0.15 if stage == "decode" else 0.0
    cluster.says("a rather long answer")


@pytest.mark.parametrize("stage", ["queue", "reserve", "prefill", "handoff", "decode"])
async def test_deadline_ends_a_request_wherever_it_is(bare: Cluster, stage: str) -> None:
    stop_at(bare, stage)
    if stage != "queue":
        await bare.list_workers(bare.prefill, bare.decode)
    started_s = time.monotonic()
    reply = await post(bare, {"x-request-timeout-s": "0.4"}, max_tokens=100)
    assert time.monotonic() - started_s > 0.3
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert bare.metric('tandem_requests_total{code="deadline_exceeded"') == 1
    if stage != "queue":
        await until(lambda: bool(bare.decode.cancelled))
        if stage in ("prefill", "handoff"):
            await until(lambda: bool(bare.prefill.cancelled))
    await at_rest(bare)


async def test_deadline_in_the_middle_of_a_stream_is_its_last_event(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    stream = body(max_tokens=100) | {"stream": True}
    reply = await cluster.http.post("/v1/completions", json=stream, headers={"x-request-timeout-s": "0.4"})
    assert reply.status_code == 200
    assert '"code":"deadline_exceeded"' in reply.text.split("\n\n")[-2 if reply.text.endswith("\n\n") else -1]
    await at_rest(cluster)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_grpc_deadline_is_the_requests(cluster: Cluster, stage: str) -> None:
    stop_at(cluster, stage)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(cluster, {}, timeout_s=0.4, max_tokens=100))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: bool(cluster.decode.cancelled))
    await until(lambda: cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 1)
    await at_rest(cluster)


async def test_grpc_metadata_may_set_a_shorter_deadline(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(generate(cluster, {"x-request-timeout-s": "0.3"}, timeout_s=30, max_tokens=100))
    assert isinstance(error_from_rpc(caught.value), DeadlineExceeded)
    await at_rest(cluster)


async def test_all_answers_of_a_request_end_at_its_deadline(cluster: Cluster) -> None:
    stop_at(cluster, "decode")
    several = body(max_tokens=100) | {"n": 3}
    reply = await cluster.http.post("/v1/completions", json=several, headers={"x-request-timeout-s": "0.3"})
    assert reply.status_code == 504
    assert cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 3
    await at_rest(cluster)


async def test_a_request_in_time_leaves_no_timer(cluster: Cluster) -> None:
    reply = await post(cluster, {"x-request-timeout-s": "60"})
    assert reply.status_code == 200
    assert not cluster.app.dispatcher._deadlines
    await at_rest(cluster)
