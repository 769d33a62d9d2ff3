"""`tandem chat`: a conversation with a running cluster, or one answer to a question from a pipe."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from rich.console import Console

from cluster.cli import state_file
from cluster.cli.router_client import chat_request, edge_channel, generate
from cluster.interruptible import run_interruptible
from tandem.errors import TandemError
from tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Settings of every request. `raw`: sends each text as a plain prompt, without a chat template."""

    model: str
    temperature: float
    max_tokens: int | None
    raw: bool = False

    def request(self, messages: list[inference_pb2.ChatMessage]) -> inference_pb2.GenerateRequest:
        if self.raw:
            sampling = inference_pb2.SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
            return inference_pb2.GenerateRequest(model=self.model, prompt=messages[-1].content, sampling=sampling)
        return chat_request(messages, model=self.model, temperature=self.temperature, max_tokens=self.max_tokens)


def run_chat(
    question: str | None,
    options: ChatOptions,
    address: str | None,
    cluster: str | None,
    ca: Path | None = None,
    api_key: str | None = None,
) -> int:
    given = str(ca) if ca is not None else None
    if address is None:
        found = state_file.find(cluster)
        address, given = found.grpc, given or found.edge_ca
    return run_interruptible(_chat(question, options, address, given, api_key))


async def _chat(question: str | None, options: ChatOptions, address: str, ca: str | None, api_key: str | None) -> int:
    """Raises the router's error; at a terminal, prints it and reads the next question."""
    interactive = question is None and sys.stdin.isatty()
    messages: list[inference_pb2.ChatMessage] = []
    async with edge_channel(address, ca) as channel:
        while (text := question or await _read_line("you> " if interactive else "")) is not None:
            if not text.strip():
                continue
            messages.append(inference_pb2.ChatMessage(role="user", content=text))
            try:
                answer = await _stream_answer(channel, options.request(messages), api_key)
            except TandemError as error:
                if not interactive:
                    raise
                Console(stderr=True, highlight=False).print(f"[red]error:[/] {error.message}")
                messages.pop()
                continue
            messages.append(inference_pb2.ChatMessage(role="assistant", content=answer))
            if question is not None:
                break
    return 0


async def _stream_answer(channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, api_key: str | None) -> str:
    answer = ""
    try:
        async for event in generate(channel, request, api_key):
            answer += event.chunk.text
            print(event.chunk.text, end="", flush=True)
    finally:
        print()
    return answer


async def _read_line(prompt: str) -> str | None:
    """Reads the next line from stdin; None at the end of the input."""
    if prompt:
        print(prompt, end="", flush=True)
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def set_result(text: str) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        text = sys.stdin.readline()
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, text)

    # A daemon thread: a blocked read cannot be interrupted, and Ctrl-C must end the command immediately.
    threading.Thread(target=read, daemon=True).start()
    return (await line).rstrip("\n") or (None if line.result() == "" else "")
