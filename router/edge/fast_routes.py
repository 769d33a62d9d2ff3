"""The few paths that carry nearly all requests go straight to their handlers, past the layers of the framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.http_gate import HttpGate

Handler = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]


class FastRoutes:
    """POST requests for `handlers`; everything else is the application's."""

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[str, Handler],
        on_error: Mapping[type[Exception], OnError],
        gate: HttpGate | None = None,
    ) -> None:
        """`gate`: stands before the handlers. `on_error`: what is answered to an error of a handler, by its class or a
        base class of it. That of Exception is also raised, so that the server logs it."""
        self._app = app
        self._handlers = handlers
        self._on_error = on_error
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._handle(handler, scope, receive, send)
        finally:
            if self._gate is not None:
                self._gate.end(scope)

    async def _handle(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            if self._gate is not None:
                await self._gate.begin(scope, scope["path"])
            response = await handler(request)
        except Exception as error:  # a handler's faults are answered and, if they are ours, raised again
            kind = next(each for each in type(error).__mro__ if each in self._on_error)
            await (await self._on_error[kind](request, error))(scope, receive, send)
            if kind is Exception:
                raise
            return
        await response(scope, receive, send)
