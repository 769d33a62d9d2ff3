"""Errors of HTTP handlers: each class has its answer, and a bug of ours is also raised, so that the server logs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from router.edge.http import HttpEdge
from router.service import RouterService
from tandem.errors import InputError, InternalError


async def post(error: Exception, *, raises: bool) -> httpx.Response:
    """A chat request whose headers the service cannot handle."""

    def terms(*args: Any, **kwargs: Any) -> None:
        raise error

    service = SimpleNamespace(calls=SimpleNamespace(is_watching=False), terms=terms)
    app = HttpEdge(cast(RouterService, service), max_body_bytes=1).app()
    transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post("/v1/chat/completions", json={})


async def test_a_fault_of_a_worker_is_an_internal_error_that_says_so() -> None:
    answer = await post(InternalError("worker p0 left out logprobs of the prompt"), raises=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "p0" in answer.json()["error"]["message"]


async def test_a_named_error_is_answered_with_its_status_and_field() -> None:
    answer = await post(InputError("wrong", field="x"), raises=True)
    assert answer.status_code == 400
    error = {"message": "wrong", "type": "invalid_request_error", "param": "x", "code": "invalid_value"}
    assert answer.json() == {"error": error}
    assert answer.headers["x-request-id"]


async def test_a_bug_is_answered_without_its_text_and_raised() -> None:
    answer = await post(KeyError("ours"), raises=False)
    assert answer.status_code == 500
    error = {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}
    assert answer.json() == {"error": error}
    with pytest.raises(KeyError):
        await post(KeyError("ours"), raises=True)
