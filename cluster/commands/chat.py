"""`tandem chat`: a conversation with a running cluster, or one answer for a pipe."""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
from rich.console import Console

from cluster import state_file
from cluster.commands.generation import chat_request, generate
from cluster.commands.running import run_interruptible
from tandem.v1 import inference_pb2


def run_chat(
    question: str | None, model: str | None, temperature: float, max_tokens: int, address: str | None, cluster: str | None
) -> int:
    target = address or state_file.find(cluster).grpc
    return run_interruptible(_chat(question, model or "", temperature, max_tokens, target))


async def _chat(question: str | None, model: str, temperature: float, max_tokens: int, address: str) -> int:
    messages: list[inference_pb2.ChatMessage] = []
    async with grpc.aio.insecure_channel(address) as channel:
        while (asked := question or await asyncio.to_thread(_read)) is not None:
            if not asked.strip():
                continue
            messages.append(inference_pb2.ChatMessage(role="user", content=asked))
            request = chat_request(messages, model=model, temperature=temperature, max_tokens=max_tokens)
            answer = ""
            async for event in generate(channel, request):
                answer += event.chunk.text
                print(event.chunk.text, end="", flush=True)
            print()
            messages.append(inference_pb2.ChatMessage(role="assistant", content=answer))
            if question is not None:
                break
    return 0


def _read() -> str | None:
    """The next question: a line from a terminal or a pipe; None at its end."""
    if sys.stdin.isatty():
        Console().print("[bold cyan]you[/] ", end="")
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
