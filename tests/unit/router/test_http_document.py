"""/tokenize, /detokenize, and the OpenAPI document, which the real answers match."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from router.edge.http import HttpEdge
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
CHAT = [{"role": "user", "content": "Hi"}]


class TestTokenize:
    async def test_detokenize_reverses_tokenize(self, cluster: Cluster) -> None:
        text = "Grüße, 5 € <|im_end|>"
        tokens = (await cluster.http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        assert tokens["tokens"] == cluster.tokenizer.encode(text, add_special_tokens=True)
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
        back = await cluster.http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}

    async def test_a_chat_has_as_many_tokens_as_its_answers_usage_says(self, cluster: Cluster) -> None:
        reply = await cluster.http.post("/tokenize", json={"model": MODEL, "messages": CHAT})
        answer = await cluster.openai.chat.completions.create(model=MODEL, messages=CHAT)
        assert reply.json()["count"] == answer.usage.prompt_tokens

    async def test_a_remote_client_can_use_the_tokenizer(self, cluster: Cluster) -> None:
        """As lm-eval does: it names no model and adds no special tokens."""
        info = (await cluster.http.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>"
        assert "message['role']" in info["chat_template"]
        asked = {"prompt": info["eos_token"], "add_special_tokens": False}
        [eos] = (await cluster.http.post("/tokenize", json=asked)).json()["tokens"]
        assert (await cluster.http.post("/detokenize", json={"tokens": [eos]})).json() == {"prompt": "<|im_end|>"}
        assert (await cluster.http.get("/tokenizer_info?model=nope")).status_code == 404

    async def test_an_empty_text_has_no_tokens(self, cluster: Cluster) -> None:
        reply = await cluster.http.post("/tokenize", json={"model": MODEL, "prompt": ""})
        assert reply.json()["tokens"] == []

    @pytest.mark.parametrize(
        ("path", "body", "status", "param"),
        [
            ("/tokenize", {"model": MODEL}, 400, "prompt"),
            ("/tokenize", {"model": MODEL, "prompt": "x", "messages": CHAT}, 400, "prompt"),
            ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
            ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
            ("/tokenize", {"model": MODEL, "prompt": "x" * 60000}, 400, "prompt"),
            ("/detokenize", {"model": MODEL, "tokens": [320]}, 400, "tokens"),
            ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens"),
            ("/detokenize", {"model": MODEL, "tokens": ["a"]}, 400, "tokens.0"),
            ("/detokenize", {"model": MODEL}, 400, "tokens"),
        ],
    )
    async def test_bad_input_is_named(
        self, cluster: Cluster, path: str, body: dict[str, Any], status: int, param: str
    ) -> None:
        reply = await cluster.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


class Document:
    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def check(self, value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": self.content["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    def answer_of(self, method: str, path: str, status: int, kind: str = "application/json") -> str:
        reply = self.content["paths"][path][method]["responses"][str(status)]
        return str(reply["content"][kind]["schema"]["$ref"].rsplit("/", 1)[1])


@pytest.fixture
async def document(cluster: Cluster) -> Document:
    return Document((await cluster.http.get("/openapi.json")).json())


async def test_every_reference_resolves(document: Document) -> None:
    schemas = document.content["components"]["schemas"]
    references = [part.split('"')[0] for part in json.dumps(document.content).split('"#/components/schemas/')[1:]]
    assert set(references) <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_the_document_has_exactly_the_served_paths(cluster: Cluster, document: Document) -> None:
    paths = document.content["paths"]
    for path, operations in paths.items():
        for method in ("get", "post"):
            reply = await cluster.http.request(method, path.replace("{name}", MODEL))
            assert (reply.status_code == 405) == (method not in operations), (method, path)
    routes = HttpEdge(cluster.app.service, max_body_bytes=1024).routes()
    assert {route.path.replace(":path", "") for route in routes} == set(paths)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"]}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [70]}),
    ],
)
async def test_answers_and_errors_are_as_documented(
    cluster: Cluster, document: Document, path: str, body: dict[str, Any]
) -> None:
    request = document.content["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    document.check({"model": MODEL} | body, request["$ref"].rsplit("/", 1)[1])
    good = await cluster.http.post(path, json={"model": MODEL} | body)
    document.check(good.json(), document.answer_of("post", path, 200))
    bad = await cluster.http.post(path, json=body | {"no_such_field": 1})
    document.check(bad.json(), document.answer_of("post", path, 400))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "stream_options": {"include_usage": True}}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 9}),
    ],
)
async def test_events_are_as_documented(cluster: Cluster, document: Document, path: str, body: dict[str, Any]) -> None:
    reply = await cluster.http.post(path, json={"model": MODEL, "stream": True} | body)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    kind = document.answer_of("post", path, 200, "text/event-stream")
    for line in lines:
        if line != "[DONE]":
            document.check(json.loads(line), kind)
    assert len(lines) > 2


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/tokenizer_info", "/health", "/ready"])
async def test_answers_of_get_are_as_documented(cluster: Cluster, document: Document, path: str) -> None:
    reply = await cluster.http.get(path.replace("{name}", MODEL))
    document.check(reply.json(), document.answer_of("get", path, 200))
