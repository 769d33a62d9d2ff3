"""The examples without a cluster: one line that says who does not answer, or whom they do not trust."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cluster import certificates

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["chat_openai.py", "chat_grpc.py"])
def test_without_a_router_an_example_ends_in_one_line(name: str) -> None:
    env = os.environ | {"TANDEM_HTTP": "http://127.0.0.1:9", "TANDEM_GRPC": "127.0.0.1:9"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server with a certificate of `tandem certs`, and its authority."""
    folder = tmp_path_factory.mktemp("certs") / "demo"
    certificates.create(folder, "demo", [], days=1, authority_days=1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "edge.pem", folder / "edge.key")
    server = HTTPServer(("127.0.0.1", 0), NotFound)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}", folder / "ca.pem"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("trusts", "said"), [(True, "404"), (False, "CERTIFICATE_VERIFY_FAILED")])
def test_the_openai_example_trusts_the_authority_it_is_told(edge: tuple[str, Path], trusts: bool, said: str) -> None:
    url, ca = edge
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_CA"} | {"TANDEM_HTTP": url}
    command = [sys.executable, str(EXAMPLES / "chat_openai.py")]
    env |= {"TANDEM_CA": str(ca)} if trusts else {}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert said in done.stderr
