"""Redis deployments from real servers, for tests of Redis clients: TLS, Sentinel, Cluster."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

HOST = "127.0.0.1"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class RedisAddress:
    url: str


class TcpServer:
    """A server on a free port; `lines` are added to its configuration file."""

    def __init__(self, folder: Path, binary: str, *lines: str, sentinel: bool = False) -> None:
        folder.mkdir()
        self.port = free_port()
        config = folder / "redis.conf"
        base = (f"port {self.port}", f"bind {HOST}", f"dir {folder}", "protected-mode no")
        stored = () if sentinel else ('save ""', "appendonly no")
        config.write_text("\n".join((*base, *stored, *lines, "")))
        command = [binary, str(config), *(["--sentinel"] if sentinel else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.redis = Redis(host=HOST, port=self.port, decode_responses=True)
        eventually(self.redis.ping)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def kill(self) -> None:
        self.redis.close()
        self._process.kill()
        self._process.wait()


def eventually(condition: Callable[[], object], timeout_s: float = START_S) -> None:
    """Waits until the condition is true. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except RedisError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"the Redis servers were not ready within {timeout_s:g} s")


def free_port() -> int:
    """A free port; the one of the cluster bus, 10,000 higher, is free too. Neither is of those that the system gives to
    connections: one of them could be taken before it is used."""
    while True:
        port = random.randrange(20_000, 22_768)
        try:
            with socket.create_server((HOST, port)), socket.create_server((HOST, port + 10_000)):
                return port
        except OSError:  # used by another
            continue


@contextlib.contextmanager
def watched_pair(folder: Path, binary: str) -> Iterator[tuple[RedisAddress, TcpServer]]:
    """A master with a replica and a sentinel; yields their address and the master."""
    master = TcpServer(folder / "master", binary)
    replica = TcpServer(folder / "replica", binary, f"replicaof {HOST} {master.port}", "repl-diskless-sync-delay 0")
    lines = (
        f"sentinel monitor ours {HOST} {master.port} 1",
        "sentinel down-after-milliseconds ours 300",
        "sentinel failover-timeout ours 2000",
    )
    eventually(lambda: replica.redis.info("replication")["master_link_status"] == "up")
    sentinel = TcpServer(folder / "sentinel", binary, *lines, sentinel=True)
    try:
        eventually(lambda: sentinel.redis.sentinel_slaves("ours"))
        yield RedisAddress(f"redis+sentinel://{HOST}:{free_port()},{HOST}:{sentinel.port}/ours"), master
    finally:
        for each in (sentinel, replica, master):
            each.kill()


def _execute(node: TcpServer, *command: str | int) -> str:
    return str(node.redis.execute_command(*command))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def sharded(folder: Path, binary: str) -> Iterator[tuple[RedisAddress, list[TcpServer]]]:
    """Three masters that share the slots."""
    lines = ("cluster-enabled yes", "cluster-node-timeout 1000")
    nodes = [TcpServer(folder / f"node-{number}", binary, *lines) for number in range(3)]
    try:
        for number, node in enumerate(nodes):
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            _execute(node, "CLUSTER ADDSLOTSRANGE", first, last)
            _execute(node, "CLUSTER MEET", HOST, nodes[0].port)
        for node in nodes:
            eventually(lambda node=node: "'cluster_state': 'ok'" in _execute(node, "CLUSTER INFO"))  # type: ignore[misc]
        places = ",".join(f"{HOST}:{node.port}" for node in nodes)
        yield RedisAddress(f"redis+cluster://{places}"), nodes
    finally:
        for node in nodes:
            node.kill()


@contextlib.asynccontextmanager
async def behind_tls(
    socket_path: Path, certificate: Mapping[str, str], client_ca: Path | None = None
) -> AsyncIterator[int]:
    """A port that terminates TLS for a server on a unix socket, because some server builds lack TLS.

    `client_ca`: clients must present a certificate signed by it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate["cert"], certificate["key"])
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=client_ca)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket_path)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
