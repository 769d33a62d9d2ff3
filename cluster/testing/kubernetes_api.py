"""An API server over HTTP, with what a rollout and the scale adapter ask it for: pods, and pools.tandem.dev objects."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from cluster.kubernetes import MERGE_PATCH

Manifest = dict[str, Any]


class FakeKubernetes:
    """`errors`: codes that it answers next, before it looks; `patch_errors`: to patches. `check`: raises ValueError for
    a Pool that the schema refuses. `asked`: (method, path, body) of each request."""

    def __init__(self, *pods: Manifest, check: Callable[[Manifest], None] = lambda pool: None) -> None:
        self.pods = {pod["metadata"]["name"]: pod for pod in pods}
        self.pools: dict[str, Manifest] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.errors: list[int] = []
        self.patch_errors: list[int] = []
        self._check = check
        self._lock = threading.Lock()
        self._versions = 0

    def add_pool(self, manifest: Mapping[str, Any]) -> None:
        """As a Helm release does it."""
        pool = copy.deepcopy(dict(manifest))
        with self._lock:
            name, number = pool["metadata"]["name"], len(self.pools)
            created = f"2026-01-01T00:00:{number:02}Z"
            pool["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": created, "generation": 0}
            self._keep(pool, {})

    def scale(self, name: str, replicas: int) -> None:
        """As `kubectl scale` and a HorizontalPodAutoscaler do it. Raises ValueError."""
        with self._lock:
            changed = copy.deepcopy(self.pools[name])
            changed["spec"]["replicas"] = replicas
            self._keep(changed, self.pools[name])

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            request = handler.command, handler.path, json.loads(body) if body else None
            self.asked.append(request)
            kind = handler.headers.get("Content-Type")
            errors = self.errors or (self.patch_errors if handler.command == "PATCH" else [])
            code, found = (errors.pop(0), {}) if errors else self._do(*request, kind)
        handler.send_response(code)
        handler.end_headers()
        handler.wfile.write(json.dumps(found).encode())

    def _do(self, method: str, path: str, body: Any, kind: str | None) -> tuple[int, Manifest]:
        names = urlsplit(path).path.split("/")
        if "pools" not in names:
            return 200, {"items": list(self.pods.values())}
        if method == "GET":
            return 200, {"items": list(self.pools.values())}
        name, *part = names[names.index("pools") + 1 :]
        if (now := self.pools.get(name)) is None:
            return 404, {}
        if kind != MERGE_PATCH:
            return 415, {}
        if body["metadata"].get("resourceVersion") not in (None, now["metadata"]["resourceVersion"]):
            return 409, {}
        changed = copy.deepcopy(now)
        field = "status" if part == ["status"] else "spec"  # each ignores what is the other's
        changed[field] = changed.get(field, {}) | body.get(field, {})
        try:
            self._keep(changed, now)
        except ValueError:
            return 422, {}
        return 200, changed

    def _keep(self, pool: Manifest, former: Manifest) -> None:
        self._check(pool)
        self._versions += 1
        pool["metadata"]["resourceVersion"] = str(self._versions)
        if pool["spec"] != former.get("spec"):
            pool["metadata"]["generation"] += 1
        self.pools[pool["metadata"]["name"]] = pool


@contextmanager
def served(api: FakeKubernetes) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        do_GET = do_DELETE = do_PATCH = lambda handler: api.answer(handler)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
