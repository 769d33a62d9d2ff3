"""A router of another project, if it is installed: sglang-router, which proxies bytes to one HTTP server.

    python -m benchmarks.proxy_peer PORT METRICS_PORT WORKER_URL      runs it

It is not a dependency of Tandem. `pip install --no-deps sglang-router` is enough to run it.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil

from benchmarks.router_bench import OTHER_CORES, ROUTER_CORE, answers_at, on_cores
from cluster.spec.resolve import free_ports

PACKAGE = "sglang_router"


class ProxyPeer:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def sent(self) -> dict[str, Any]:
        """Empty, because the peer reports no requests."""
        return {}


@asynccontextmanager
async def peer_running(answer_tokens: int, step_ms: float) -> AsyncIterator[ProxyPeer | None]:
    """Runs on the router's core, like Tandem's router. None if it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        yield None
        return
    server, process, port = _start(answer_tokens, step_ms)
    try:
        await answers_at(port, "/health", process)
        yield ProxyPeer(process, port)
    finally:
        for each in (process, server):
            each.kill()
            each.wait()


def _start(answer_tokens: int, step_ms: float) -> tuple[subprocess.Popen[str], subprocess.Popen[bytes], int]:
    """Starts the HTTP server and the peer in front of it. Returns both and the peer's port."""
    command = [sys.executable, "-m", "benchmarks.http_stub", "--answer-tokens", str(answer_tokens)]
    with on_cores(OTHER_CORES):
        server = subprocess.Popen(
            [*command, "--step-ms", str(step_ms)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    worker_port = int(server.stdout.readline()) if server.stdout else 0
    port, metrics_port = free_ports("127.0.0.1", "127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.proxy_peer", str(port), str(metrics_port)]
    with on_cores(ROUTER_CORE):
        process = subprocess.Popen([*command, f"http://127.0.0.1:{worker_port}"], stdout=subprocess.DEVNULL)
    return server, process, port


def main() -> int:
    port, metrics_port, *workers = sys.argv[1:]
    arguments = importlib.import_module(f"{PACKAGE}.router_args").RouterArgs(
        worker_urls=workers, host="127.0.0.1", port=int(port), prometheus_port=int(metrics_port), log_level="error"
    )
    importlib.import_module(f"{PACKAGE}.router").Router.from_args(arguments).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
