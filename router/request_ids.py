"""Every HTTP answer carries `x-request-id`: the client's own where it sent one, else ours."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request import new_request_id

HEADER = b"x-request-id"
_SHAPE = re.compile(rb"[\w.:-]{1,128}", re.ASCII)  # anything else is not repeated


class RequestIds:
    """Puts the id that we made into `scope["request_id"]`. A client's id is for its own books and goes no further."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ours = new_request_id()
        scope["request_id"] = ours
        given: bytes = next((value for name, value in scope["headers"] if name == HEADER), b"")
        shown = given if _SHAPE.fullmatch(given) else ours.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HEADER, shown)]
            await send(message)

        await self._app(scope, receive, send_with_id)
