"""A model hub on this machine, as far as its client asks."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelHub:
    """`downloaded`: names of the files whose contents were asked for."""

    url: str
    downloaded: list[str] = field(default_factory=list)


@contextmanager
def model_hub(name: str, folder: Path, said_sizes: Mapping[str, int] | None = None) -> Iterator[ModelHub]:
    """Serves the files of `folder` as the model `name`. `said_sizes`: what it says of a file instead of its size."""
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    sizes = {each: path.stat().st_size for each, path in files.items()} | dict(said_sizes or {})

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        commit = "0" * 39 + "1"

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            asked = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{name}/tree/"):
                tree = [{"type": "file", "path": each, "size": sizes[each], "oid": "0" * 40} for each in files]
                self.reply(200, json.dumps(tree).encode(), with_body)
            elif path.startswith(f"/api/models/{name}"):
                info = {"id": name, "sha": self.commit, "siblings": [{"rfilename": each} for each in files]}
                self.reply(200, json.dumps(info).encode(), with_body)
            elif path.startswith(f"/{name}/resolve/") and asked in files:
                if with_body:
                    hub.downloaded.append(asked)
                self.reply(200, files[asked].read_bytes(), with_body, etag=f"etag-{asked}")
            else:
                self.reply(404, b"{}", with_body)

        def reply(self, status: int, body: bytes, with_body: bool, etag: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if etag is not None:
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", self.commit)
            elif status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = ModelHub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
