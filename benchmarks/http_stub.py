"""An OpenAI-compatible server without a model, for routers that proxy HTTP. It streams at a given pace.

python -m benchmarks.http_stub --answer-tokens 64 --step-ms 20      prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_MODEL = {"id": "bench", "object": "model"}
_ABOUT = json.dumps({"status": "ok", "model_path": "bench", "object": "list", "data": [_MODEL]}).encode()


class StubServer(asyncio.Protocol):
    """Serves one connection. Request bodies are read and discarded."""

    def __init__(self, answer_tokens: int, step_s: float) -> None:
        self._answer_tokens = answer_tokens
        self._step_s = step_s
        self._got = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length or 0):
            return
        self._got = b""
        if head.startswith(b"POST"):
            self._task = asyncio.create_task(self._stream())
        else:
            self._transport.write(_HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(_ABOUT) + _ABOUT)

    async def _stream(self) -> None:
        self._transport.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        self._write(_event({"role": "assistant", "content": ""}, None))
        for _ in range(self._answer_tokens):
            await asyncio.sleep(self._step_s)
            self._write(_event({"content": " word"}, None))
        self._write(_event({}, "length") + b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _event(delta: dict[str, str], reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "bench"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: StubServer(options.answer_tokens, options.step_ms / 1000), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20)
    uvloop.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
