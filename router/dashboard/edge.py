"""`/dashboard`: a page of static files that hold no data, and the API that it asks. Read-only."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.dashboard.source import SnapshotSource
from tandem.errors import InputError

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # also what clients call theirs
# Nothing but what this router serves; no inline script or style, no frame around it.
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: dict[str, str]


class DashboardEdge:
    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._files = _load(STATIC)

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard", self.redirect, methods=["GET"]),
            Route("/dashboard/", self.index, methods=["GET"]),
            Route("/dashboard/static/{name}", self.static, methods=["GET"]),
            Route("/dashboard/api/v1/snapshot", self.snapshot, methods=["GET"]),
            Route("/dashboard/api/v1/requests/{request_id}", self.request, methods=["GET"]),
        ]

    async def redirect(self, request: Request) -> Response:
        """Relative, so that it holds behind a proxy that puts something before the path."""
        return Response(status_code=307, headers=SECURITY_HEADERS | {"location": "dashboard/"})

    async def index(self, request: Request) -> Response:
        return self._file(request, INDEX)

    async def static(self, request: Request) -> Response:
        return self._file(request, request.path_params["name"])

    async def snapshot(self, request: Request) -> Response:
        return _json(await self._source.cluster_json())

    async def request(self, request: Request) -> Response:
        """Raises InputError, NotFound."""
        request_id = request.path_params["request_id"]
        if not _REQUEST_ID.fullmatch(request_id):
            raise InputError("request_id: expected letters, digits and '_.:-', at most 128", field="request_id")
        return _json(msgspec.json.encode(self._source.timeline(request_id)))

    def _file(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.content, headers=found.headers)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers=SECURITY_HEADERS | {"cache-control": "no-store"})


def _load(folder: Path) -> dict[str, _File]:
    """Every file there is, by its name: no path that a client sends is ever looked up on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        headers = {
            "content-type": _TYPES[path.suffix],
            "cache-control": "no-cache",  # asked for again each time, and mostly not sent again
            "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        files[path.name] = _File(content, SECURITY_HEADERS | headers)
    return files
