"""Hot paths answer, and fail, as every other path does."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.edge.fast_routes import FastRoutes
from tandem.errors import InputError, TandemError


async def _told(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"told {error}", 400)


async def _bug(request: Request, error: Exception) -> Response:
    return PlainTextResponse("bug", 500)


async def _rest(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("rest")(scope, receive, send)


async def ask(path: str, fails: Exception | None = None, method: str = "POST", kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def handler(request: Request) -> Response:
        if fails is not None:
            raise fails
        return PlainTextResponse("hot")

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("status", message.get("body")))

    app = FastRoutes(_rest, {"/hot": handler}, {TandemError: _told, Exception: _bug})
    scope = {"type": kind, "method": method, "path": path, "headers": []}
    try:
        await app(scope, receive, send)
    except KeyError:
        sent.append("raised")
    return sent


@pytest.mark.parametrize(
    ("path", "method", "expected"),
    [("/hot", "POST", b"hot"), ("/hot", "GET", b"rest"), ("/hot/", "POST", b"rest"), ("/cold", "POST", b"rest")],
)
async def test_only_posts_of_hot_paths_go_past_the_application(path: str, method: str, expected: bytes) -> None:
    assert await ask(path, method=method) == [200, expected]


async def test_errors_are_answered_by_their_class_and_bugs_also_raised() -> None:
    assert await ask("/hot", InputError("wrong", field="x")) == [400, b"told wrong"]
    assert await ask("/hot", KeyError("ours")) == [500, b"bug", "raised"]
