"""What router/edge relies on in uvicorn beyond its public API. If an upgrade breaks it, a test here fails by name."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

REQUEST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 5000), "sockname": ("192.0.2.2", 80)})
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Recorder(HttpToolsProtocol):
    """Notes which of the overridden methods are called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[str] = []

    def on_message_begin(self) -> None:
        self.seen.append("on_message_begin")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.seen.append("on_header")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.seen.append("on_headers_complete")
        super().on_headers_complete()
        self.scope["note"] = "added after on_headers_complete"  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        self.seen.append("on_message_complete")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.seen.append("send_400_response")
        super().send_400_response(msg)


def config_of(app: Any) -> uvicorn.Config:
    config = uvicorn.Config(app, http=Recorder, ws="none", lifespan="off", log_config=None, timeout_keep_alive=5)
    config.load()
    return config


async def connect(app: Any) -> tuple[Recorder, Transport]:
    protocol, transport = Recorder(config=config_of(app), server_state=ServerState(), app_state={}), Transport()
    protocol.connection_made(transport)
    return protocol, transport


async def settle(protocol: HttpToolsProtocol) -> None:
    await asyncio.gather(*protocol.tasks)


class Gated:
    """An application that starts its answer, without a length, and ends it when `end` is set."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.end.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_request_calls_the_methods_that_the_protocol_overrides_in_order() -> None:
    app = Gated()
    protocol, _ = await connect(app)
    protocol.data_received(REQUEST)
    assert protocol.seen == ["on_message_begin", *["on_header"] * 2, "on_headers_complete", "on_message_complete"]
    app.end.set()
    await settle(protocol)
    assert app.scope["note"] == "added after on_headers_complete", "the application gets the protocol's own scope"


async def test_a_protocol_has_its_loop_transport_flow_and_connections() -> None:
    protocol, transport = await connect(Gated())
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.transport is transport
    assert isinstance(protocol.flow, FlowControl)
    assert protocol.connections == protocol.server_state.connections == {protocol}
    assert protocol.cycle is None, "before the first request"
    protocol.connection_lost(None)
    assert not protocol.connections


async def test_the_cycle_shows_whether_the_answer_has_started_and_is_complete() -> None:
    app = Gated()
    protocol, _ = await connect(app)
    protocol.data_received(REQUEST)
    assert not protocol.cycle.response_started
    await asyncio.sleep(0)
    assert (protocol.cycle.response_started, protocol.cycle.response_complete) == (True, False)
    app.end.set()
    await settle(protocol)
    assert protocol.cycle.response_complete


async def test_an_answer_without_a_length_is_chunked_and_takes_chunks_past_send() -> None:
    app = Gated()
    protocol, transport = await connect(app)
    protocol.data_received(REQUEST)
    await asyncio.sleep(0)
    head, _, rest = transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    assert rest == b"", "the head is written at once"
    transport.write(b"2\r\nok\r\n")
    app.end.set()
    await settle(protocol)
    assert transport.written.endswith(b"\r\n\r\n2\r\nok\r\n0\r\n\r\n")


async def test_a_parser_callback_that_raises_ends_in_send_400_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Recorder, name: bytes, value: bytes) -> None:
        raise OverflowError

    monkeypatch.setattr(Recorder, "on_header", refuse)
    protocol, transport = await connect(Gated())
    protocol.data_received(REQUEST)
    assert protocol.seen[-1] == "send_400_response"
    assert "on_headers_complete" not in protocol.seen
    assert transport.written.startswith(b"HTTP/1.1 400")
    assert transport.closed


async def test_flow_control_pauses_drains_and_ends_with_the_connection() -> None:
    protocol, _ = await connect(Gated())
    assert (protocol.flow.read_paused, protocol.flow.write_paused) == (False, False)
    protocol.pause_writing()
    assert protocol.flow.write_paused
    draining = asyncio.create_task(protocol.flow.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    protocol.connection_lost(OSError())
    await draining
    assert not protocol.flow.write_paused


async def test_shutdown_closes_an_idle_connection_at_once_and_a_busy_one_after_its_answer() -> None:
    idle, idle_transport = await connect(Gated())
    idle.shutdown()
    assert idle_transport.closed
    app = Gated()
    busy, busy_transport = await connect(app)
    busy.data_received(REQUEST)
    await asyncio.sleep(0)
    busy.shutdown()
    assert not busy_transport.closed
    app.end.set()
    await settle(busy)
    assert busy_transport.closed


class Server(uvicorn.Server):
    """Notes which of the overridden methods are called."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.seen: list[str] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self.seen.append("capture_signals")
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self.seen.append("startup")
        self.servers = []
        self.started = True

    async def main_loop(self) -> None:
        self.seen.append("main_loop")
        assert await self.on_tick(0) is False
        assert self.server_state.default_headers, "on_tick sets the date once per second"
        self.should_exit = True
        assert await self.on_tick(1) is True

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self.seen.append("shutdown")
        assert self.server_state.connections == set()
        assert self.server_state.tasks == set()


async def test_serve_calls_the_methods_that_the_server_overrides_in_order() -> None:
    server = Server(config_of(Gated()))
    await server.serve(sockets=[])
    assert server.seen == ["capture_signals", "startup", "main_loop", "shutdown"]


def test_overridden_methods_take_the_same_arguments() -> None:
    for name, expected in (
        ("startup", ["self", "sockets"]),
        ("shutdown", ["self", "sockets"]),
        ("main_loop", ["self"]),
        ("on_tick", ["self", "counter"]),
        ("capture_signals", ["self"]),
    ):
        assert list(inspect.signature(getattr(uvicorn.Server, name)).parameters) == expected, name


def test_a_loaded_config_has_what_our_startup_reads() -> None:
    config = config_of(Gated())
    assert config.http_protocol_class is Recorder
    assert config.ssl is None
    assert config.backlog > 0
    assert uvicorn.Config(Gated(), timeout_graceful_shutdown=5).timeout_graceful_shutdown == 5
