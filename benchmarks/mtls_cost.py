"""The cost of mutual TLS between router and worker: round trips of frames on one gRPC stream, as in a session.

    python -m benchmarks.mtls_cost [--frames N] [--bytes N]

Both ends run in one process, so the CPU time includes both. Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cluster.certificates import create, folder_spec
from tandem.rpc.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, add_port, make_server, open_channel
from tandem.rpc.identity import Identity

METHOD = "/bench/Talk"
WARM_UP = 200
ROUNDS = 5


async def _talk(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


async def measure(worker: ClusterTls | None, router: ClusterTls | None, frames: int, size: int) -> dict[str, float]:
    """Microseconds to the channel's first answer, and per round trip of a frame (median and CPU)."""
    server = make_server(worker, {METHOD: frozenset({Identity.ROUTER})}, SERVER_OPTIONS)
    handlers: dict[str, Any] = {"Talk": grpc.stream_stream_rpc_method_handler(_talk)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', worker)}"
    await server.start()
    frame = bytes(size)
    async with open_channel(address, router, Identity.WORKER, CLIENT_OPTIONS) as channel:
        call: Any = channel.stream_stream(METHOD)()
        took: list[float] = []
        cpu_s = 0.0
        for number in range(WARM_UP + frames):
            if number == WARM_UP:
                cpu_s = time.process_time()
            sent_s = time.perf_counter()
            await call.write(frame)
            await call.read()
            took.append(time.perf_counter() - sent_s)
        used_s = time.process_time() - cpu_s
        call.cancel()
    await server.stop(None)
    return {
        "connect_us": 1e6 * took[0],  # includes the handshake
        "frame_us": 1e6 * statistics.median(took[WARM_UP:]),
        "frame_cpu_us": 1e6 * used_s / frames,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=2000, help="size of a frame; a step of 64 tokens takes about 2000")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        create(certs, "bench", [], days=1, authority_days=1)
        ends = [ClusterTls("bench", each, folder_spec(certs)) for each in (Identity.WORKER, Identity.ROUTER)]
        found: dict[str, list[dict[str, float]]] = {"plain": [], "mtls": []}
        for _ in range(ROUNDS):  # alternating, so a busy machine affects both
            found["plain"].append(asyncio.run(measure(None, None, options.frames, options.bytes)))
            found["mtls"].append(asyncio.run(measure(ends[0], ends[1], options.frames, options.bytes)))
        for kind, rounds in found.items():
            for name in rounds[0]:
                value = statistics.median(each[name] for each in rounds)
                print(json.dumps({"figure": f"{kind}_{name}", "value": round(value, 1), "bytes": options.bytes}))


if __name__ == "__main__":
    main()
