"""Keeps web pages from calling a router that accepts every caller because it listens on loopback.

A browser sends what any page tells it to, and gives the page the answers if the name of its site resolves to this
machine (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import PermissionDenied

_LOCAL = (".localhost", ".local", ".internal")  # no site can have such a name


@dataclass(frozen=True, slots=True)
class WebPages:
    """`allowed`: origins such as https://chat.example.org; "*": any."""

    allowed: Sequence[str]

    def check(self, headers: Headers) -> None:
        """Raises PermissionDenied for what a page of another site sent, and for a name that a site may have."""
        if "*" in self.allowed:
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        names = {_hostname(each) for each in self.allowed}
        if (name := _hostname(f"//{host}")) not in names and not _is_local(name):
            raise _denied("host", f"an address or a name of this machine, got {host[:100]!r}")
        if origin is not None and origin not in self.allowed and origin.partition("://")[2] != host:
            raise _denied("origin", f"no page of another site, got {origin[:100]!r}")

    def kept_from(self, app: ASGIApp, on_error: Callable[[Request, Exception], Awaitable[Response]]) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                request = Request(scope)
                try:
                    self.check(request.headers)
                except PermissionDenied as error:
                    await (await on_error(request, error))(scope, receive, send)
                    return
            await app(scope, receive, send)

        return guarded


def _denied(header: str, expected: str) -> PermissionDenied:
    return PermissionDenied(
        f"{header}: expected {expected}: callers need no key here, so web pages may not call; name the page's "
        "origin in router.cors_origins, or require keys (security.auth)",
        field=header,
    )


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return "?."  # no name


def _is_local(name: str) -> bool:
    if "." not in name or name.endswith(_LOCAL):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
