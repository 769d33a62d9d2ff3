"""`/dashboard`: static files without data, and the read-only API that the page polls."""

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

from router.dashboard.shared_snapshots import SnapshotSource
from tandem.errors import InputError

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # allows clients' x-request-id, too
# Allows only content of this router; no inline script or style, no frames.
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
            Route("/", self.redirect, methods=["GET"]),
            Route("/dashboard", self.redirect, methods=["GET"]),
            Route("/dashboard/", self.index, methods=["GET"]),
            Route("/dashboard/static/{name}", self.static, methods=["GET"]),
            Route("/dashboard/api/v1/snapshot", self.snapshot, methods=["GET"]),
            Route("/dashboard/api/v1/requests/{request_id}", self.request, methods=["GET"]),
        ]

    async def redirect(self, request: Request) -> Response:
        """Redirects to a relative location, which works behind a proxy with a path prefix."""
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
            raise InputError(
                f"request_id: expected 1 to 128 letters, digits and '_.:-', got {request_id[:40]!r}", field="request_id"
            )
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
    """All files by name, read once: no client's path is looked up on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        headers = {
            "content-type": _TYPES[path.suffix],
            "cache-control": "no-cache",  # revalidated by etag on each load
            "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        files[path.name] = _File(content, SECURITY_HEADERS | headers)
    return files
