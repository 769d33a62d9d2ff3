"""What a router with stub workers keeps, counts and tells of single requests."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from router.edge.controller_api import SECRET_KEY
from router.testing.stub_worker import BLOCK_BYTES, until
from tandem.v1 import inference_pb2, trace_pb2, trace_pb2_grpc
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
PROMPT = {"model": MODEL, "prompt": "Hi"}
SECRET = (("tandem-controller-secret", "only-the-controller-knows"),)


def traces(cluster: Cluster) -> trace_pb2_grpc.TracesAsyncStub:
    stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(cluster.channel)
    return stub


async def get(cluster: Cluster, request_id: str) -> trace_pb2.RequestTrace:
    return await traces(cluster).GetTrace(trace_pb2.GetTraceRequest(request_id=request_id), metadata=SECRET)


async def test_every_way_in_tells_the_id_that_leads_to_the_trace(cluster: Cluster) -> None:
    assert SECRET[0][0] == SECRET_KEY
    raw = await cluster.openai.completions.with_raw_response.create(**PROMPT)
    answer = raw.parse()
    by_header, by_id = await get(cluster, raw.headers["x-request-id"]), await get(cluster, answer.id)
    assert by_header == by_id
    assert answer.id == f"cmpl-{by_id.request_id}"
    events = cluster.inference.Generate(inference_pb2.GenerateRequest(model=MODEL, prompt="Hi"))
    ids = [event.started.request_id async for event in events if event.HasField("started")]
    assert (await get(cluster, ids[0])).request_id == ids[0]


async def test_a_clients_own_id_finds_its_trace(cluster: Cluster) -> None:
    named = {"x-request-id": "shop:order-17"}
    answer = await cluster.openai.completions.create(**PROMPT, extra_headers=named)
    assert (await get(cluster, "shop:order-17")).request_id == answer.id.removeprefix("cmpl-")
    call = cluster.inference.Generate(
        inference_pb2.GenerateRequest(model=MODEL, prompt="Hi"), metadata=(("x-request-id", "shop:order-18"),)
    )
    ids = [event.started.request_id async for event in call if event.HasField("started")]
    assert [(await get(cluster, "shop:order-18")).request_id] == ids
    shown = await cluster.http.get("/dashboard/api/v1/requests/shop:order-18")
    assert shown.json()["request"]["request_id"] == ids[0]


async def test_of_several_answers_the_first_is_found(cluster: Cluster) -> None:
    answer = await cluster.openai.completions.create(**PROMPT, n=2)
    assert (await get(cluster, answer.id)).request_id == f"{answer.id.removeprefix('cmpl-')}-0"


async def test_a_trace_has_both_sides_and_their_account(cluster: Cluster) -> None:
    answer = await cluster.openai.completions.create(**PROMPT)
    trace = await get(cluster, answer.id)
    assert (trace.model, trace.state, trace.completion_tokens) == (MODEL, "finished", answer.usage.completion_tokens)
    (attempt,) = trace.attempts
    assert (attempt.prefill_worker, attempt.decode_worker) == ("p0", "d0")
    assert {span.stage for span in attempt.spans} == {
        "queue", "reserve", "dispatch", "prefill", "connect", "pieces", "verify", "first_token", "join", "decode",
    }  # fmt: skip
    assert (attempt.bytes, attempt.pieces) == (BLOCK_BYTES, 1)
    assert attempt.overlap_share == 0.5


async def test_the_prefill_workers_word_counts_even_when_the_answer_was_quicker(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_sent_reports = True
    answer = await cluster.openai.completions.create(**PROMPT)
    assert not (await get(cluster, answer.id)).attempts[0].HasField("sent")
    [report] = cluster.prefill.sent_reports
    report()
    await until(lambda: cluster.metric("tandem_handoff_hidden_bytes_total") == BLOCK_BYTES // 2)
    assert (await get(cluster, answer.id)).attempts[0].HasField("sent")


async def test_stages_bytes_and_pieces_are_metrics(cluster: Cluster) -> None:
    await cluster.openai.completions.create(**PROMPT)
    for stage, seconds in {"connect": 0.001, "pieces": 0.002, "verify": 0.001, "join": 0.001}.items():
        labels = f'{{model="tiny",stage="{stage}"}}'
        assert cluster.metric(f"tandem_handoff_stage_seconds_count{labels}") == 1, stage
        assert cluster.metric(f"tandem_handoff_stage_seconds_sum{labels}") == pytest.approx(seconds), stage
    for stage in ("reserve", "dispatch", "prefill"):
        assert cluster.metric(f'tandem_handoff_stage_seconds_count{{model="tiny",stage="{stage}"}}') == 1
    assert cluster.metric("tandem_handoff_bytes_total") == BLOCK_BYTES
    assert cluster.metric("tandem_handoff_pieces_total") == 1
    assert cluster.metric("tandem_handoff_overlap_share_sum") == 0.5


async def test_the_latest_are_listed_first(cluster: Cluster) -> None:
    ids = [(await cluster.openai.completions.create(**PROMPT)).id for _ in range(3)]
    listed = await traces(cluster).ListTraces(trace_pb2.ListTracesRequest(limit=2), metadata=SECRET)
    assert [f"cmpl-{trace.request_id}" for trace in listed.traces] == [ids[2], ids[1]]


async def test_an_unknown_id_is_not_found_with_what_to_do(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await get(cluster, "nobody")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert "tandem trace" in (unknown.value.details() or "")


@pytest.mark.acceptance(42, here="seen: as stated; no API cancels by id, and servers make the ids")
@pytest.mark.parametrize("metadata", [(), (("tandem-controller-secret", "guess"),)])
async def test_clients_may_not_look_at_each_others_requests(cluster: Cluster, metadata: Any) -> None:
    answer = await cluster.openai.completions.create(**PROMPT)
    calls: list[Awaitable[object]] = [
        traces(cluster).GetTrace(trace_pb2.GetTraceRequest(request_id=answer.id), metadata=metadata),
        traces(cluster).ListTraces(trace_pb2.ListTracesRequest(), metadata=metadata),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
