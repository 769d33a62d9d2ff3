"""What a call costs before it submits a request: turns on the parsers' threads, and the tokens of /tokenize."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from router import service
from router.admission import parse_threads
from router.auth.principal import AccessLevel, Principal
from router.requests.raw_request import RawRequest, RawSampling
from router.requests.serving_model import ServingModel
from router.testing.stub_worker import until
from tandem.config.auth import LimitsSpec
from tandem.config.router import RouterSpec
from tandem.errors import RateLimited
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import MODEL, Cluster

LONG = "x" * 3000


@pytest.fixture
def spec() -> RouterSpec:
    return RouterSpec(http_port=0, grpc_port=0)


@pytest.fixture
def keys(keys: Keys) -> Keys:
    keys.add("short", limits=LimitsSpec(tokens_per_minute=300))
    return keys


async def test_bodies_texts_and_prompts_wait_by_the_tenant_of_their_key(cluster: Cluster, keys: Keys) -> None:
    threads, gate = cluster.app.service.threads, threading.Event()
    held = [asyncio.create_task(threads.run("", 1, gate.wait)) for _ in range(parse_threads.PARSER_THREADS)]
    await asyncio.sleep(0)
    acme, rival = keys.bearer("acme"), keys.bearer("rival")
    text: dict[str, Any] = {"model": MODEL, "prompt": LONG}
    padded = b" " * 100_000 + b'{"prompt": "Hi", "model": "tiny"}'
    sent = [
        asyncio.create_task(cluster.http.post("/v1/completions", content=padded, headers=acme)),
        asyncio.create_task(cluster.http.post("/v1/completions", json=text, headers=acme)),
        asyncio.create_task(cluster.http.post("/tokenize", json=text, headers=rival)),
        asyncio.create_task(cluster.http.post("/detokenize", json={"tokens": [70] * 600}, headers=rival)),
    ]
    waiting = threads._slots._waiting
    await until(lambda: [waiting.count("parsing", each) for each in ("acme", "rival", "")] == [2, 2, 0])
    gate.set()
    await asyncio.gather(*held, *sent)
    assert [each.result().status_code for each in sent] == [200, 400, 200, 200]  # 400: longer than the context


async def test_tokenize_is_billed_before_it_costs(
    cluster: Cluster, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, metadata = keys.bearer("short"), keys.metadata("short")
    body = {"model": MODEL, "prompt": "word " * 90}
    first = await cluster.http.post("/tokenize", json=body, headers=headers)
    assert first.status_code == 200
    assert first.json()["count"] > 450 // 8, "more than the estimate, and it is all billed"

    def none_is_due(*_: object, **__: object) -> None:
        pytest.fail("a refused text was tokenized")

    monkeypatch.setattr(ServingModel, "tokenize", none_is_due)
    monkeypatch.setattr(ServingModel, "detokenize", none_is_due)
    for path, refused in (("/tokenize", body), ("/detokenize", {"tokens": [70] * 300})):
        answer = await cluster.http.post(path, json=refused, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "300 tokens per minute" in answer.json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await cluster.inference.Tokenize(pb.TokenizeRequest(prompt=LONG), metadata=metadata)
    assert isinstance(error_from_rpc(told.value), RateLimited)


@pytest.mark.parametrize("more", [{}, {"idempotency-key": "k"}], ids=["plain", "keyed"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_the_request_is_counted_before_its_body_is_read(
    cluster: Cluster, keys: Keys, path: str, more: dict[str, str]
) -> None:
    keys.add("few", limits=LimitsSpec(requests_per_minute=1))
    headers = keys.bearer("few") | more

    async def asked() -> int:
        return (await cluster.http.post(path, content=b"{", headers=headers)).status_code

    async with asyncio.timeout(60):
        while (status := await asked()) == 401:  # until the key is loaded
            await asyncio.sleep(0.01)
    assert [status, await asked()] == [400, 429]


async def test_a_call_in_parts_is_billed_when_it_is_checked_and_only_for_what_it_submits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PART_TOKENS", 1)
    router = cluster.app.service
    raws = [RawRequest(MODEL, (70,) * 60, RawSampling(max_tokens=1))] * 3

    def asked() -> tuple[Any, Any]:
        call = router.calls.begin("POST /v1/embeddings", AccessLevel.CALLER, "", "r", "")
        call.principal = Principal("k", "acme", limits=LimitsSpec(tokens_per_minute=300))
        terms = router.terms(lambda name: None, call=call)
        return call, router.submit_in_parts(raws, ["input"] * 3, 4, "call", terms)

    first, parts = asked()
    await (await anext(parts)).collect()
    with pytest.raises(RateLimited):
        await anext(asked()[1])
    assert first.prompt_tokens == 180
    await parts.aclose()
    assert first.prompt_tokens == 60
    _, others = asked()
    await (await anext(others)).collect()
    await others.aclose()
    await cluster.settled()


async def test_the_ids_of_a_long_text_are_checked_by_the_threads(cluster: Cluster, keys: Keys) -> None:
    threads, gate, headers = cluster.app.service.threads, threading.Event(), keys.bearer("acme")
    held = [asyncio.create_task(threads.run("", 1, gate.wait)) for _ in range(parse_threads.PARSER_THREADS)]
    await asyncio.sleep(0)
    wrong = asyncio.create_task(
        cluster.http.post("/detokenize", json={"tokens": [70] * 600 + [10**6]}, headers=headers)
    )
    await until(lambda: threads._slots._waiting.count("parsing", "acme") == 1)
    gate.set()
    await asyncio.gather(*held, wrong)
    assert (wrong.result().status_code, wrong.result().json()["error"]["param"]) == (400, "tokens")
