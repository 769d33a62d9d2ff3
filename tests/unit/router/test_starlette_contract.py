"""What router/edge relies on in Starlette beyond its public API. If an upgrade breaks it, a test here fails by name."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route


async def handler(request: Request) -> Response:
    return PlainTextResponse("handler")


async def ask(app: Starlette, method: str, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.request(method, path)


async def wrapped(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("wrapped")(scope, receive, send)


@pytest.mark.parametrize("route", [Route("/x/y", handler, methods=["POST"]), Mount("/x", Starlette())])
async def test_a_routes_app_can_be_replaced(route: Route | Mount) -> None:
    route.app = wrapped
    assert (await ask(Starlette(routes=[route]), "POST", "/x/y")).text == "wrapped"


async def test_only_a_request_that_matches_path_and_method_reaches_the_app_of_a_route() -> None:
    route = Route("/x", handler, methods=["POST"])
    route.app = wrapped
    app = Starlette(routes=[route])
    app.router.redirect_slashes = False
    assert (await ask(app, "GET", "/x")).status_code == 405
    for path in ("/x/", "/y"):
        assert (await ask(app, "POST", path)).status_code == 404


async def test_the_handler_of_a_base_class_answers_an_error_of_a_wrapped_app() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    async def on_error(request: Request, error: Exception) -> Response:
        return PlainTextResponse(type(error).__name__, 400)

    route = Route("/x", handler, methods=["POST"])
    route.app = fails
    answer = await ask(Starlette(routes=[route], exception_handlers={LookupError: on_error}), "POST", "/x")
    assert (answer.status_code, answer.text) == (400, "KeyError")
