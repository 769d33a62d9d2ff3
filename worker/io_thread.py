"""The rank process's I/O thread: its event loop serves the leader's socket, so the step loop never waits for I/O."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.rpc.channel import Channel, ChannelError, ThreadSender
from worker.inbox import Inbox, Stop
from worker.messages import LeaderReady, ServiceToLeader, ToRouter

T = TypeVar("T")


class IoThread:
    """Runs coroutines on behalf of threads that must not block."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class ServiceLink:
    """The socket to which the service process connects. Losing it stops the worker: routers can no longer reach it."""

    def __init__(self, io: IoThread, inbox: Inbox) -> None:
        self._io = io
        self._inbox = inbox
        self._sender: ThreadSender | None = None
        self._waiting: list[msgspec.Struct] = []

    def listen(self, path: Path, ready: LeaderReady) -> None:
        """Accepts exactly one service and sends it `ready`."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._sender is not None:
                writer.close()
                return
            self._sender = ThreadSender(writer)
            self._sender.send(ready)
            channel: Channel[ServiceToLeader] = Channel(reader, writer, ServiceToLeader)
            try:
                async for message in channel:
                    self._inbox.put(message)
                self._inbox.put(Stop("the service process is gone"))
            except ChannelError as error:
                self._inbox.put(Stop(f"the service process sent an invalid message: {error}"))

        self._io.submit(_listen(accept, path)).result()

    def send(self, message: msgspec.Struct) -> None:
        """Queues the message until the next `flush`."""
        self._waiting.append(message)

    def flush(self) -> None:
        if self._waiting and self._sender is not None:
            self._sender.send(*self._waiting)
        self._waiting.clear()

    def send_frame(self, session: int, frame: bytes) -> None:
        self.send(ToRouter(session, frame))


async def _listen(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]], path: Path
) -> None:
    await asyncio.start_unix_server(accept, str(path))
