"""The HTTP server: uvicorn with our own limits, renewal of certificates, and a fast shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from router.edge.limits.http import protocol, sweep_forever
from router.edge.tls import HANDSHAKE_TIMEOUT_S, EdgeTls
from tandem.errors import PortInUse


class _UvicornServer(uvicorn.Server):
    """Leaves signals to the process, and shuts down without uvicorn's fixed waits of 0.1 s each."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit_event = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._exit_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        for tenth in itertools.cycle(range(10)):  # `on_tick` counts tenths of a second
            if await self.on_tick(tenth):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._exit_event.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110  # uvicorn offers no event
                    await asyncio.sleep(0.01)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Limits the time of a TLS handshake, for which uvicorn would give a client a minute."""
        config, state = self.config, self.server_state
        if config.ssl is None:
            await super().startup(sockets)
            return

        protocol_class: Any = config.http_protocol_class
        connect = partial(protocol_class, config=config, server_state=state, app_state={})
        listen = partial(asyncio.get_running_loop().create_server, connect, backlog=config.backlog, ssl=config.ssl)
        self.servers = [await listen(sock=sock, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S) for sock in sockets or []]
        self.started = True


def bind(host: str, port: int) -> socket.socket:
    """Raises PortInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise PortInUse(
            f"router.http_port: cannot listen on {host}:{port} ({error.strerror}); free it or choose another port",
            field="router.http_port",
        ) from None
    sock.setblocking(False)
    return sock


class HttpServer:
    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        max_connections: int,
        client_timeout_s: float,
        keep_alive_s: float,
        tls: EdgeTls | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(max_connections=max_connections, client_timeout_s=client_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # a float works too
            timeout_graceful_shutdown=5,
        )
        config.load()
        if tls is not None:
            config.ssl = tls.http_context  # uvicorn's own context cannot be renewed
        self._server = _UvicornServer(config)
        self._tls = tls
        self._sock = sock
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        self._sweeper = asyncio.create_task(sweep_forever(self._server.server_state.connections), name="http-sweeper")
        if self._tls is not None:
            self._refresher = asyncio.create_task(self._tls.refresh_forever(), name="http-certificates")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110  # uvicorn offers no event
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._server.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        for task in (self._sweeper, self._refresher):
            if task is not None:
                task.cancel()
        self._sock.close()
