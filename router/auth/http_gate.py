"""Authentication on the HTTP edge. It runs after a route has matched, so no spelling of a path can bypass it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.access import KEY_HEADER, KEY_HEADER_ROUTES, http_access
from router.auth.call import Call
from router.auth.call_gate import CallGate
from router.auth.principal import ANONYMOUS, AccessLevel
from router.request_ids import trace_id_of
from tandem.errors import TandemError, Unauthenticated

CALL = "tandem.call"  # in a request's scope
_REALM = 'realm="tandem"'


class HttpGate:
    def __init__(self, calls: CallGate) -> None:
        self._calls = calls

    def guard(self, routes: Sequence[BaseRoute]) -> None:
        """Wraps the handler of each route. Raises TypeError for a kind of route that it cannot guard."""
        for route in routes:
            if not isinstance(route, Route | Mount):
                raise TypeError(f"expected a Route or a Mount, got {type(route).__name__}")
            route.app = self._guarded(route.path, route.app)

    def _guarded(self, path: str, app: ASGIApp) -> ASGIApp:
        access = http_access(path)
        if access is AccessLevel.PUBLIC or not self._calls.is_watching:
            return app

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            call = scope[CALL] = self._begin(scope, path, access)
            try:
                await self._calls.authenticate(call, _authorization(scope, path))
                await app(scope, receive, send)
            finally:
                if not call.is_detached:
                    self._calls.finish(call)

        return guarded

    def _begin(self, scope: Scope, path: str, access: AccessLevel) -> Call:
        return self._calls.begin(
            f"{scope['method']} {path}",
            access,
            _source(scope),
            scope.get("request_id", ""),
            trace_id_of(_header(scope, b"traceparent")),
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    """If the header is repeated, the last one counts."""
    return next((value for given, value in reversed(scope["headers"]) if given == name), None)


def _authorization(scope: Scope, route: str) -> str | None:
    """The header of that name counts, if there are both."""
    if (given := _header(scope, b"authorization")) is not None:
        return given.decode("latin-1")
    key = _header(scope, KEY_HEADER.encode()) if route in KEY_HEADER_ROUTES else None
    return None if key is None else f"Bearer {key.decode('latin-1')}"


def call_of(scope: Scope) -> Call | None:
    """None if calls are not watched, and on public routes."""
    found = scope.get(CALL)
    return found if isinstance(found, Call) else None


def caller_of(scope: Scope) -> str:
    """The key of a call; of one without a key the client's address."""
    call = call_of(scope)
    return _source(scope) if call is None or call.principal is ANONYMOUS else call.principal.key_id


def _source(scope: Scope) -> str:
    client = scope.get("client")
    return "" if client is None else str(client[0])


def note_error(scope: Scope, error: TandemError) -> dict[str, str]:
    """Sets the code of the call; returns the headers that the answer needs (RFC 9110, section 11.6.1)."""
    call = call_of(scope)
    if call is None:
        return {}
    call.code = error.code
    if not isinstance(error, Unauthenticated):
        return {}
    basic = f", Basic {_REALM}" if call.access is AccessLevel.ADMIN else ""
    return {"www-authenticate": f"Bearer {_REALM}{basic}"}
