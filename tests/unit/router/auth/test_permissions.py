"""What a key permits, end to end: tenant, models, classes and limits; and its audit lines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from cluster.cli.router_client import chat_request, generate
from router.auth import api_keys
from router.auth.keys_file import change_keys, read_keys
from router.auth.principal import AccessLevel
from router.testing.stub_worker import until
from tandem.config.auth import LimitsSpec
from tandem.errors import Unauthenticated
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from tandem.v1 import cluster_pb2
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
LONG = "the same words of every tenant " * 8


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_known(cluster: Cluster, keys: Keys, tenant: str) -> bool:
    """Whether the router has loaded the key of a tenant from the file."""
    calls = cluster.app.service.calls
    try:
        calls.identify(calls.begin("GET /x", AccessLevel.CALLER, "", "", ""), keys.bearer(tenant)["authorization"])
    except Unauthenticated:
        return False
    return True


async def complete(cluster: Cluster, headers: dict[str, str], **body: Any) -> httpx.Response:
    answer: httpx.Response = await cluster.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 4} | body, headers=headers
    )
    return answer


async def salts(cluster: Cluster, *asked: tuple[dict[str, str], dict[str, Any]]) -> list[bytes]:
    """The cache salts that the worker received."""
    found = []
    for headers, body in asked:
        before = set(cluster.decode.works)
        assert (await complete(cluster, headers, **body)).status_code == 200
        (new,) = set(cluster.decode.works) - before
        found.append(cluster.decode.works[new].cache_salt)
    return found


async def test_each_tenant_has_its_own_salt_and_a_clients_salt_divides_it_further(cluster: Cluster, keys: Keys) -> None:
    acme, rival = keys.bearer("acme"), keys.bearer("rival")
    own, again, other, salted, other_salted = await salts(
        cluster,
        (acme, {}),
        (acme | {"x-tandem-tenant": "acme"}, {}),
        (rival, {}),
        (acme, {"cache_salt": "team-1"}),
        (rival, {"cache_salt": "team-1"}),
    )
    assert own == again
    assert len({own, other, salted, other_salted}) == 4
    assert all(len(each) == 32 for each in (own, other, salted, other_salted))
    stream = cluster.inference.Generate(
        pb.GenerateRequest(prompt="x", cache_salt="team-1"), metadata=keys.metadata("acme")
    )
    before = set(cluster.decode.works)
    assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
    (new,) = set(cluster.decode.works) - before
    assert cluster.decode.works[new].cache_salt == salted, "over gRPC as over HTTP"


async def test_the_tenant_is_that_of_the_key_and_only_admins_may_name_another(cluster: Cluster, keys: Keys) -> None:
    refused = await complete(cluster, keys.bearer("acme") | {"x-tandem-tenant": "rival"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "x-tandem-tenant")
    own, for_acme = await salts(
        cluster, (keys.bearer("acme"), {}), (keys.bearer("operator") | {"x-tandem-tenant": "acme"}, {})
    )
    assert own == for_acme


async def test_a_model_that_the_key_does_not_allow_is_not_found(cluster: Cluster, keys: Keys) -> None:
    keys.add("narrow", models=("other",), priorities=("batch",))
    await until(lambda: is_known(cluster, keys, "narrow"))
    headers = keys.bearer("narrow")
    await _until_status(cluster, headers, 200)
    assert (await cluster.http.get("/v1/models", headers=headers)).json()["data"] == []
    for path in (f"/v1/models/{MODEL}", "/tokenizer_info"):
        assert (await cluster.http.get(path, headers=headers)).status_code == 404
    answers = [
        await complete(cluster, headers),
        await cluster.http.post("/tokenize", json={"model": MODEL, "prompt": "x"}, headers=headers),
        await cluster.http.post("/detokenize", json={"model": MODEL, "tokens": [1]}, headers=headers),
    ]
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(404, "model_not_found")] * 3
    assert not any(MODEL in each.json()["error"]["message"].split("got")[0] for each in answers)
    metadata = keys.metadata("narrow")
    assert not (await cluster.inference.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
    stub = oip_grpc.GRPCInferenceServiceStub(cluster.channel)
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL), metadata=metadata)).ready
    text = oip.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=oip.InferTensorContents(bytes_contents=[b"x"])
    )
    for ask in (
        stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL), metadata=metadata),
        stub.ModelConfig(oip.ModelConfigRequest(name=MODEL), metadata=metadata),
        stub.ModelInfer(oip.ModelInferRequest(model_name=MODEL, inputs=[text]), metadata=metadata),
        cluster.inference.Tokenize(pb.TokenizeRequest(model=MODEL, prompt="x"), metadata=metadata),
        cluster.inference.Generate(pb.GenerateRequest(prompt="x"), metadata=metadata).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_statistics_of_all_tenants_need_an_admin_key_and_the_configuration_any(
    cluster: Cluster, keys: Keys
) -> None:
    stub = oip_grpc.GRPCInferenceServiceStub(cluster.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ModelStatistics(oip.ModelStatisticsRequest(), metadata=keys.metadata("acme"))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    told = await stub.ModelStatistics(oip.ModelStatisticsRequest(), metadata=keys.metadata("operator"))
    assert [each.name for each in told.model_stats] == [MODEL]
    asked = oip.ModelConfigRequest(name=MODEL)
    assert (await stub.ModelConfig(asked, metadata=keys.metadata("acme"))).config.name == MODEL


async def test_a_key_may_name_its_classes_only_and_defaults_to_its_first(cluster: Cluster, keys: Keys) -> None:
    keys.add("nightly", priorities=("batch",))
    keys.add("lost", priorities=("gone-class",))
    await until(lambda: is_known(cluster, keys, "lost"))
    refused = await complete(cluster, keys.bearer("nightly") | {"x-tandem-priority": "interactive"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "x-tandem-priority")
    assert (await complete(cluster, keys.bearer("nightly"))).status_code == 200
    assert (await complete(cluster, keys.bearer("lost"))).status_code == 403


async def test_the_model_of_an_adapter_is_shown_only_to_keys_that_may_use_it(cluster: Cluster, keys: Keys) -> None:
    cluster.app.service.models.set_adapters(
        [cluster_pb2.ModelAdapter(model=MODEL, name="sql", fingerprint="a" * 32, served=True)]
    )
    keys.add("tuned", models=("sql",))
    await until(lambda: is_known(cluster, keys, "tuned"))
    for tenant, parent in (("tuned", None), ("acme", MODEL)):
        headers = keys.bearer(tenant)
        [card] = [
            each
            for each in (await cluster.http.get("/v1/models", headers=headers)).json()["data"]
            if each["id"] == "sql"
        ]
        assert card.get("parent") == parent
        assert (await cluster.http.get("/v1/models/sql", headers=headers)).json() == card
        cards = await cluster.inference.ListModels(pb.ListModelsRequest(), metadata=keys.metadata(tenant))
        assert [each.parent for each in cards.models if each.name == "sql"] == [parent or ""]


async def test_both_limits_answer_429_with_a_delay_over_http_and_grpc(
    cluster: Cluster, keys: Keys, tmp_path: Path
) -> None:
    cluster.says("one two three four")
    keys.add("few", limits=LimitsSpec(requests_per_minute=3))
    keys.add("short", limits=LimitsSpec(tokens_per_minute=30))
    await until(lambda: is_known(cluster, keys, "short"))
    assert [(await complete(cluster, keys.bearer("few"))).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = await cluster.http.post("/tokenize", json={"prompt": "x"}, headers=keys.bearer("few"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await cluster.inference.Generate(pb.GenerateRequest(prompt="x"), metadata=keys.metadata("few")).read()
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"RetryInfo" in dict(told.value.trailing_metadata())["grpc-status-details-bin"]

    # A prompt larger than one minute's worth passes when the bucket is full, which then falls below zero.
    assert (await complete(cluster, keys.bearer("short"), prompt=LONG)).status_code == 200
    refused = await complete(cluster, keys.bearer("short"))
    assert refused.status_code == 429

    def asked() -> list[dict[str, Any]]:
        return [line for line in lines(tmp_path / "audit.jsonl") if line["method"] != "GET /v1/models"]

    await until(lambda: len(asked()) == 8)
    used = [line for line in asked() if line["tenant"] == "short"]
    debt = used[0]["prompt_tokens"] + used[0]["completion_tokens"] - 30
    assert abs(int(refused.headers["retry-after"]) - min(60, (debt + 1) * 2)) <= 3
    assert cluster.metric('tandem_requests_total{code="rate_limit_exceeded"') == 3  # /tokenize makes no request


async def test_a_prompt_is_billed_once_for_all_its_choices_also_with_logprobs(cluster: Cluster, keys: Keys) -> None:
    cluster.says("x")
    keys.add("once", limits=LimitsSpec(tokens_per_minute=100))
    await until(lambda: is_known(cluster, keys, "once"))
    body = {"model": MODEL, "prompt": [70] * 60, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}
    for prompt, status in (([70] * 60, 200), ([70] * 30, 200), ([70] * 60, 429)):
        answer = await cluster.http.post("/v1/completions", json=body | {"prompt": prompt}, headers=keys.bearer("once"))
        assert answer.status_code == status, answer.text


async def test_a_changed_file_is_reloaded_and_a_broken_one_leaves_the_keys(
    cluster: Cluster, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    old = keys.bearer("acme")
    record = api_keys.rotate(_record(keys, "acme"), datetime.now(UTC), grace=timedelta(hours=1), expires=None)
    change_keys(keys.path, lambda known: known.with_key(record.record))
    new = {"authorization": f"Bearer {record.text}"}
    await _until_status(cluster, new, 200)
    assert (await complete(cluster, old)).status_code == 200, "two live keys while it is rotated"

    good = keys.path.read_text()
    for broken in ("keys: [", "keys: [{id: 1}]", "nonsense: 1", "\x00"):
        seen = len(caplog.records)
        keys.path.write_text(broken)
        await until(lambda seen=seen: any("stays in use" in each.message for each in caplog.records[seen:]))  # type: ignore[misc]
        assert (await complete(cluster, new)).status_code == 200
    seen = len(caplog.records)
    keys.path.unlink()
    await until(lambda: any("stays in use" in each.message for each in caplog.records[seen:]))
    assert (await complete(cluster, new)).status_code == 200

    keys.path.write_text(good)
    keys.path.chmod(0o600)
    change_keys(keys.path, lambda known: known.without(keys.ids["acme"]))
    await _until_status(cluster, new, 401)
    assert (await complete(cluster, old)).status_code == 401


async def test_an_open_stream_stops_answering_when_its_key_is_removed(
    cluster: Cluster, keys: Keys, tmp_path: Path
) -> None:
    cluster.says("hello")
    keys.add("leaver")
    await until(lambda: is_known(cluster, keys, "leaver"))
    stub: oip_grpc.GRPCInferenceServiceAsyncStub = oip_grpc.GRPCInferenceServiceStub(cluster.channel)
    stream = stub.ModelStreamInfer(metadata=keys.metadata("leaver"))
    text = oip.InferTensorContents(bytes_contents=[b"x"])
    tensor = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=text)
    request = oip.ModelInferRequest(model_name=MODEL, inputs=[tensor])

    async def read() -> oip.ModelStreamInferResponse:
        reply = await stream.read()
        assert isinstance(reply, oip.ModelStreamInferResponse)
        return reply

    await stream.write(request)
    while not (await read()).infer_response.parameters["triton_final_response"].bool_param:
        pass
    change_keys(keys.path, lambda known: known.without(keys.ids["leaver"]))
    await until(lambda: not is_known(cluster, keys, "leaver"))
    await stream.write(request)
    with pytest.raises(grpc.aio.AioRpcError, match="expected a valid API key") as ended:
        await read()
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await until(lambda: len(lines(tmp_path / "audit.jsonl")) == 1)
    [line] = lines(tmp_path / "audit.jsonl")
    assert (line["tenant"], line["outcome"], line["code"]) == ("leaver", "rejected", "invalid_api_key")
    assert cluster.metric('tandem_requests_total{code="invalid_api_key"') == 1


async def test_a_stream_whose_request_was_refused_is_not_logged_as_finished(
    cluster: Cluster, keys: Keys, tmp_path: Path
) -> None:
    stub: oip_grpc.GRPCInferenceServiceAsyncStub = oip_grpc.GRPCInferenceServiceStub(cluster.channel)
    stream = stub.ModelStreamInfer(iter([oip.ModelInferRequest(model_name="nope")]), metadata=keys.metadata("acme"))
    [reply] = [each async for each in stream]
    assert "inputs: expected" in reply.error_message
    await until(lambda: len(lines(tmp_path / "audit.jsonl")) == 1)
    [line] = lines(tmp_path / "audit.jsonl")
    assert (line["outcome"], line["code"]) == ("rejected", "invalid_argument")


def _record(keys: Keys, tenant: str) -> api_keys.KeyRecord:
    return read_keys(keys.path).find(keys.ids[tenant])


async def _until_status(cluster: Cluster, headers: dict[str, str], status: int) -> None:
    async with asyncio.timeout(60):
        while (await cluster.http.get("/v1/models", headers=headers)).status_code != status:
            await asyncio.sleep(0.1)


@pytest.mark.acceptance(44, here="prompts, answers and keys in the audit log and in debug logs")
async def test_the_audit_log_has_one_line_for_each_call_and_never_prompts_or_keys(
    cluster: Cluster, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    caplog.set_level(logging.DEBUG, "uvicorn")
    audit = tmp_path / "audit.jsonl"
    cluster.says("a secret answer")
    trace = "0af7651916cd43dd8448eb211c80319c"
    await complete(cluster, keys.bearer("acme") | {"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
                   prompt="a secret question", n=2, user="somebody")  # fmt: skip
    await complete(cluster, {"authorization": f"Bearer {keys.texts['acme'][:-1]}!"})
    await complete(cluster, keys.bearer("acme"), temperature=99)
    client = openai.AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=keys.texts["rival"], max_retries=0)
    stream = await client.completions.create(model=MODEL, prompt="a secret question", stream=True)
    assert [chunk async for chunk in stream]
    await client.close()
    call = cluster.inference.Generate(pb.GenerateRequest(prompt="a secret question"), metadata=keys.metadata("acme"))
    events = [event async for event in call]
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.inference.ListModels(pb.ListModelsRequest())
    await until(lambda: len(lines(audit)) == 6)

    found = lines(audit)
    assert [(line["method"], line["tenant"], line["outcome"], line["code"]) for line in found] == [
        ("POST /v1/completions", "acme", "finished", None),
        ("POST /v1/completions", "", "rejected", "invalid_api_key"),
        ("POST /v1/completions", "acme", "rejected", "invalid_argument"),
        ("POST /v1/completions", "rival", "finished", None),
        ("/tandem.v1.Inference/Generate", "acme", "finished", None),
        ("/tandem.v1.Inference/ListModels", "", "rejected", "invalid_api_key"),
    ]
    first = found[0]
    assert (first["trace_id"], first["key_id"], first["model"]) == (trace, keys.ids["acme"], MODEL)
    assert first["completion_tokens"] == 2 * 4
    assert first["prompt_tokens"] == len(cluster.tokenizer.encode("a secret question", add_special_tokens=True))
    assert {line["source"] for line in found} == {"127.0.0.1"}
    assert len({line["request_id"] for line in found[:5]}) == 5
    assert all(len(line["request_id"]) == 24 for line in found[:5])
    assert found[4]["request_id"] == events[0].started.request_id
    assert [line["model"] for line in found] == [MODEL, "", MODEL, MODEL, MODEL, ""]
    datetime.fromisoformat(first["time"])

    metrics = (await cluster.http.get("/metrics", headers=keys.bearer("operator"))).text
    told = audit.read_text() + caplog.text + metrics
    for secret in ("secret", "somebody", *(text[17:] for text in keys.texts.values())):
        assert secret not in told
    assert os.stat(audit).st_mode & 0o777 == 0o600


async def test_the_audit_line_of_a_refused_request_names_the_requested_model(
    cluster: Cluster, keys: Keys, tmp_path: Path
) -> None:
    long_name = "x" * 1000
    await cluster.http.post("/v1/completions", json={"model": long_name, "prompt": "a"}, headers=keys.bearer("acme"))
    named = (*keys.metadata("acme"), ("x-request-id", "shop-17"))
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(aiter(cluster.inference.Generate(pb.GenerateRequest(model="nowhere"), metadata=named)))
    await until(lambda: len(lines(tmp_path / "audit.jsonl")) == 2)
    http, rpc = lines(tmp_path / "audit.jsonl")
    assert (http["model"], http["outcome"]) == (long_name[:128], "rejected")
    assert (rpc["model"], rpc["outcome"], rpc["request_id"]) == ("nowhere", "rejected", "shop-17")


async def test_the_client_of_the_command_line_sends_its_key(cluster: Cluster, keys: Keys) -> None:
    cluster.says("hello")
    asked = chat_request([pb.ChatMessage(role="user", content="x")], model="", temperature=0.0, max_tokens=4)
    events = [event async for event in generate(cluster.channel, asked, keys.texts["acme"])]
    assert events[-1].HasField("finished")
    with pytest.raises(Unauthenticated):
        await anext(generate(cluster.channel, asked))


async def test_the_audit_line_of_a_cut_off_answer_is_cancelled_with_its_tokens(
    cluster: Cluster, keys: Keys, tmp_path: Path
) -> None:
    cluster.says("word " * 40)
    cluster.decode.behaviour.token_delay_s = 0.02
    audit = tmp_path / "audit.jsonl"
    body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100}
    async with cluster.http.stream("POST", "/v1/completions", json=body, headers=keys.bearer("acme")) as answer:
        async for _ in answer.aiter_lines():
            break
    await until(lambda: len(lines(audit)) == 1)
    call = cluster.inference.Generate(
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=100)), metadata=keys.metadata("acme")
    )
    for _ in range(3):
        await call.read()
    call.cancel()
    await until(lambda: len(lines(audit)) == 2)
    for line in lines(audit):
        assert (line["outcome"], line["code"]) == ("cancelled", "cancelled")
        assert line["prompt_tokens"] > 0
        assert 0 < line["completion_tokens"] < 100
    await cluster.settled()
