"""Clients that need little CPU: streams over bare sockets and gRPC, parsed only for where tokens begin."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import grpc

from tandem.v1 import inference_pb2

GENERATE = "/tandem.v1.Inference/Generate"
_EVENT = b"data: "
_LAST_CHUNK = b"0\r\n\r\n"
_REQUEST_ID = b"x-request-id: "


@dataclass(slots=True)
class TokenTimes:
    """The arrival time of each token of one answer, on the host's monotonic clock."""

    sent_s: float
    request_id: str = ""
    tokens_s: list[float] = field(default_factory=list)


class BenchClient(Protocol):
    async def ask(self, prompt: str) -> TokenTimes:
        """Sends one request. Raises RuntimeError unless the answer is complete."""
        ...

    async def close(self) -> None: ...


class RawHttpClient:
    """Streamed chat completions over kept-alive connections."""

    def __init__(self, port: int, model: str, answer_tokens: int) -> None:
        self._port = port
        self._model = model
        self._answer_tokens = answer_tokens
        self._idle: list[_HttpConnection] = []

    async def ask(self, prompt: str) -> TokenTimes:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": self._answer_tokens,
            "temperature": 0.7,
        }
        sent = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        raw = f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent
        connection = await self._connection()
        times = await connection.ask(raw)
        if len(times.tokens_s) != self._answer_tokens:
            raise RuntimeError(f"expected {self._answer_tokens} tokens, got {len(times.tokens_s)}")
        self._idle.append(connection)
        return times

    async def _connection(self) -> _HttpConnection:
        """An open one: the router closes those that were idle for 5 s."""
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_HttpConnection, "127.0.0.1", self._port)
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _HttpConnection(asyncio.Protocol):
    """One answer at a time. Its first event is the role, its last two are the end; the others are tokens."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[TokenTimes] | None = None
        self._times = TokenTimes(0.0)
        self._head = b""
        self._in_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def ask(self, raw: bytes) -> asyncio.Future[TokenTimes]:
        if self._transport is None:
            raise RuntimeError("the connection is closed")
        self._done = asyncio.get_running_loop().create_future()
        self._times, self._head, self._in_head = TokenTimes(time.monotonic()), b"", True
        self._transport.write(raw)
        return self._done

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._in_head:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._in_head = False
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(self._head[:300].decode(errors="replace"))
                return
            self._times.request_id = head.partition(_REQUEST_ID)[2].partition(b"\r\n")[0].decode()
        events = data.count(_EVENT)
        self._times.tokens_s += [now_s] * events
        if data.endswith(_LAST_CHUNK) and self._done is not None:
            del self._times.tokens_s[0], self._times.tokens_s[-2:]
            self._done.set_result(self._times)
            self._done = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the router closed the connection")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, what: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(what))


class RawGrpcClient:
    """Generate streams over a few channels. Messages are parsed at the end: each may have several tokens."""

    CHANNELS = 4

    def __init__(self, port: int, model: str, answer_tokens: int) -> None:
        self._model = model
        self._answer_tokens = answer_tokens
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(self.CHANNELS)]
        self._calls = [
            channel.unary_stream(GENERATE, request_serializer=_as_bytes, response_deserializer=_as_bytes)
            for channel in self._channels
        ]
        self._asked = 0

    async def ask(self, prompt: str) -> TokenTimes:
        sampling = inference_pb2.SamplingParams(max_tokens=self._answer_tokens, temperature=0.7)
        chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content=prompt)])
        request = inference_pb2.GenerateRequest(model=self._model, chat=chat, sampling=sampling)
        call = self._calls[self._asked % self.CHANNELS]
        self._asked += 1
        times = TokenTimes(time.monotonic())
        came: list[tuple[float, bytes]] = []
        async for message in call(request.SerializeToString()):
            came.append((time.monotonic(), message))
        messages = [(at_s, inference_pb2.GenerateResponse.FromString(each)) for at_s, each in came]
        times.tokens_s += [at_s for at_s, each in messages for _ in each.chunk.token_ids]
        if len(times.tokens_s) != self._answer_tokens:
            raise RuntimeError(f"expected {self._answer_tokens} tokens, got {len(times.tokens_s)}")
        times.request_id = messages[0][1].started.request_id
        return times

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _as_bytes(message: bytes) -> bytes:
    return message


async def open_loop(client: BenchClient, prompt: Callable[[], str], rate: float, seconds: float) -> list[TokenTimes]:
    """Sends `rate` requests per second, independent of the answers."""
    tasks = []
    began_s = time.monotonic()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(client.ask(prompt())))
    return list(await asyncio.gather(*tasks))


async def closed_loop(client: BenchClient, prompt: Callable[[], str], streams: int, seconds: float) -> list[TokenTimes]:
    """Keeps `streams` requests in flight."""
    times: list[TokenTimes] = []
    until_s = time.monotonic() + seconds

    async def stream() -> None:
        while time.monotonic() < until_s:
            times.append(await client.ask(prompt()))

    await asyncio.gather(*(stream() for _ in range(streams)))
    return times
