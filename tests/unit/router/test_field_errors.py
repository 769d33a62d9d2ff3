"""What clients are told about a wrong field: what was expected, what came, and OpenAI's code for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.conftest import Cluster

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"model": 5}, "model: expected a string, got 5", "invalid_type"),
        ({"model": None}, "model: expected a string, got null", "invalid_type"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot'", "invalid_type"),
        ({"stream": "yes"}, "stream: expected true or false, got 'yes'", "invalid_type"),
        ({"messages": {}}, "messages: expected a list, got an object", "invalid_type"),
        ({"messages": []}, "messages: expected at least 1 item, got a list of 0", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: expected a value, got none", "missing_required_parameter"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages.0.role: expected 'system', 'developer', 'user', 'assistant', 'tool' or 'function', got 'robot'",
            "invalid_value",
        ),
        ({"n": 0}, "n: expected at least 1, got 0", "invalid_value"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: expected at most 20, got 21", "invalid_value"),
        ({"stop": 5}, "stop: expected a string or a list, got 5", "invalid_type"),
        ({"colour": "red"}, "colour: unknown field; leave it out", "unknown_parameter"),
        ({"Format": 1}, "Format: unknown field; leave it out", "unknown_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.image_url.url: expected a data URL such as data:image/png;base64,..., got 'x'",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages.0.content.0.type: expected 'text', got 'video_url'",
            "invalid_value",
        ),
    ],
    ids=lambda each: str(each)[:50],
)
async def test_a_wrong_field_is_told_in_full(cluster: Cluster, fields: dict[str, Any], message: str, code: str) -> None:
    reply = await cluster.http.post("/v1/chat/completions", json=CHAT | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["message"], error["code"]) == (400, message, code)
    assert error["param"] == message.partition(":")[0]


async def test_codes_that_clients_look_for(cluster: Cluster) -> None:
    long = CHAT | {"messages": [{"role": "user", "content": "x" * 600}]}
    error = (await cluster.http.post("/v1/chat/completions", json=long)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens" in error["message"]
    error = (await cluster.http.post("/v1/chat/completions", json=CHAT | {"audio": {}})).json()["error"]
    assert error["code"] == "unsupported_parameter"


async def test_a_compressed_body_and_a_wrong_method_have_their_own_status(cluster: Cluster) -> None:
    reply = await cluster.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert reply.status_code == 415
    assert "uncompressed" in reply.json()["error"]["message"]
    reply = await cluster.http.get("/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
