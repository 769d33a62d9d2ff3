"""Embeddings through a real router and real workers, as OpenAI's client and those of rerankers ask for them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModel

from router.edge.http import EMBEDDED_AT_ONCE
from tandem.config.engine import EngineSpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tests.integration.conftest import StartRouted

HIDDEN = 64
ENGINE = EngineSpec(kv_blocks=600, max_step_tokens=100)
ALWAYS = RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS)
TEXTS = ["a fox", "the fox in the snow", "x" * 200, "a fox"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=300, seed=1)


def expected(model_dir: Path, text: str) -> Any:
    tokens = Tokenizer.load(model_dir).encode(text, add_special_tokens=True)
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(model_dir, dtype=torch.float32)(torch.tensor([tokens])).last_hidden_state
    row = hidden[0, -1].numpy()
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_the_official_client_gets_embeddings(routed: StartRouted, tiny: Path, prefill: int) -> None:
    async with routed(tiny, prefill=prefill, decode=1, engine=ENGINE, router=ALWAYS) as live:
        url = f"http://127.0.0.1:{live.app.http_port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = await client.embeddings.create(model="tiny", input=TEXTS)  # in base64, which is its default
            assert [each.index for each in answer.data] == [0, 1, 2, 3]
            for text, each in zip(TEXTS, answer.data, strict=True):
                np.testing.assert_allclose(each.embedding, expected(tiny, text), atol=1e-4)
            tokens = [Tokenizer.load(tiny).encode(text, add_special_tokens=True) for text in TEXTS]
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
            first = await client.embeddings.create(model="tiny", input=tokens[1], encoding_format="float")
            np.testing.assert_allclose(first.data[0].embedding, expected(tiny, TEXTS[1]), atol=1e-4)
            short = await client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
            part = expected(tiny, TEXTS[0])[:8]
            np.testing.assert_allclose(short.data[0].embedding, part / np.linalg.norm(part), atol=1e-4)
            many = [f"text {number}" for number in range(EMBEDDED_AT_ONCE + 3)]
            found = await client.embeddings.create(model="tiny", input=many)
            assert len(found.data) == len(many)
            np.testing.assert_allclose(found.data[-1].embedding, expected(tiny, many[-1]), atol=1e-4)
        rendered = live.app.metrics.render().decode()
        assert 'reason="handoff_configured"} 0.0' in rendered
        assert ('reason="prompt_alone"} 0.0' not in rendered) == bool(prefill)


async def test_texts_are_scored_and_ranked(routed: StartRouted, tiny: Path) -> None:
    rows = [expected(tiny, text) for text in TEXTS]
    async with (
        routed(tiny, prefill=1, decode=1, engine=ENGINE) as live,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.app.http_port}/v1", timeout=60) as client,
    ):

        async def ask(path: str, **fields: Any) -> dict[str, Any]:
            reply = await client.post(path, json={"model": "tiny"} | fields)
            assert reply.status_code == 200, reply.text
            found: dict[str, Any] = reply.json()
            return found

        scores = (await ask("/score", text_1=TEXTS[0], text_2=TEXTS[1:]))["data"]
        assert [each["score"] for each in scores] == pytest.approx([rows[0] @ row for row in rows[1:]], abs=1e-4)
        pairs = (await ask("/score", text_1=TEXTS[:2], text_2=TEXTS[2:]))["data"]
        assert [each["score"] for each in pairs] == pytest.approx([rows[0] @ rows[2], rows[1] @ rows[3]], abs=1e-4)
        ranked = await ask("/rerank", query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[3]}, TEXTS[2]], top_n=2)
        best = ranked["results"][0]
        assert (best["index"], best["document"]) == (1, {"text": TEXTS[3]})
        assert best["relevance_score"] == pytest.approx(1.0, abs=1e-4)
        assert len(ranked["results"]) == 2
        assert ranked["results"][1]["relevance_score"] < best["relevance_score"]
        bare = await ask("/rerank", query="a", documents=["b"], return_documents=False)
        assert "document" not in bare["results"][0]
        raw = (await ask("/embeddings", input="a fox", encoding_format="base64"))["data"][0]["embedding"]
        assert len(base64.b64decode(raw)) == 4 * HIDDEN


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/embeddings", {"input": []}, "input", "expected a text or token ids"),
    ("/embeddings", {"input": ""}, "input", "expected at least one token"),
    ("/embeddings", {"input": ["a"] * 2049}, "input", "expected at most 2048 texts"),
    ("/embeddings", {"input": "x y " * 9000}, "input", "maximum context length"),
    ("/embeddings", {"input": [999]}, "input", "token ids from 0 to 299"),
    ("/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "expected at most 64"),
    ("/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "expected at least 1"),
    ("/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "expected"),
    ("/embeddings", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not supported"),
    ("/embeddings", {"input": "a", "model": "other"}, "model", "expected one of"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "as many texts as text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "at least 1 item"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "at least 1 item"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "expected at least 1"),
    ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "expected"),
    ("/embeddings", {"input": ["a"] * 70 + [""]}, "input.70", "input.70: expected at least one token"),
    ("/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1.1", "expected at least one token"),
    ("/score", {"text_1": "a", "text_2": "x y " * 9000}, "text_2", "maximum context length"),
    ("/rerank", {"query": "", "documents": ["b"]}, "query", "expected at least one token"),
    ("/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "documents.1", "expected at least one token"),
]


async def test_bad_input_names_the_field(routed: StartRouted, tiny: Path) -> None:
    async with (
        routed(tiny, prefill=0, decode=1, engine=ENGINE) as live,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.app.http_port}/v1", timeout=60) as client,
    ):
        for path, fields, field, said in BAD:
            reply = await client.post(path, json={"model": "tiny"} | fields)
            assert reply.status_code in (400, 404), (fields, reply.text)
            error = reply.json()["error"]
            assert str(error["param"]).startswith(field), (fields, error)
            assert said in error["message"], (fields, error)


async def test_a_text_that_no_worker_can_hold_is_named(routed: StartRouted, tiny: Path) -> None:
    async with (
        routed(tiny, prefill=0, decode=1, engine=EngineSpec(kv_blocks=20, max_step_tokens=100)) as live,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.app.http_port}/v1", timeout=60) as client,
    ):
        texts = ["a"] * (EMBEDDED_AT_ONCE + 1) + ["b", "x" * 400]
        reply = await client.post("/embeddings", json={"model": "tiny", "input": texts})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, f"input.{len(texts) - 1}")
        reply = await client.post("/embeddings", json={"model": "tiny", "input": "a", "dimensions": 65})
        assert reply.status_code == 400
        rejected = [line for line in live.app.metrics.render().decode().splitlines() if "rejected" in line]
        assert any('model="tiny"' in line and not line.endswith(" 0.0") for line in rejected), rejected


async def test_a_model_that_pools_otherwise_is_refused(routed: StartRouted, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=300, seed=1)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    async with (
        routed(model, prefill=1, decode=1, engine=ENGINE) as live,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.app.http_port}/v1", timeout=60) as client,
    ):
        reply = await client.post("/embeddings", json={"model": "tiny", "input": "a"})
        assert reply.status_code == 400
        assert "without an embedding: no engine of tiny can do that" in reply.json()["error"]["message"]
        reply = await client.post("/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3})
        assert reply.status_code == 200
