"""The benchmark beside vLLM's own pair: its client and its turns, without vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_client import PeerFailed, Prompts, Server, Stream, VllmPair, in_turns
from benchmarks.vllm_pair import closed_loop

Reply = Callable[[dict[str, Any]], bytes]
PROMPT = list(range(64))


@asynccontextmanager
async def serving(reply: Reply, status: str = "200 OK") -> AsyncIterator[Server]:
    """A server that keeps its connections. `reply` makes the body from the request's."""
    handlers: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                body = reply(json.loads(await reader.readexactly(length)))
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server = Server(f"127.0.0.1:{port}")
    async with listener:
        try:
            yield server
        finally:
            server.close()
            await asyncio.gather(*(each for each in handlers if each is not None))


def streamed(*texts: str, cached_tokens: int = 0) -> bytes:
    usage = {"completion_tokens": len(texts), "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    events = [{"choices": [{"text": text}]} for text in texts] + [{"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"


async def test_the_first_event_with_text_is_the_first_token() -> None:
    async with serving(lambda asked: streamed("", "a", "b")) as server:
        answer = await server.stream(PROMPT, 3)
    assert (answer.tokens, len(answer.texts_s)) == (3, 2)
    assert 0 < answer.ttft_ms <= answer.second_ms


async def test_an_answer_of_other_length_and_an_error_in_a_stream_are_failures() -> None:
    async with serving(lambda asked: streamed("a", "b")) as server:
        with pytest.raises(PeerFailed, match="expected 3 tokens"):
            await server.stream(PROMPT, 3)
    async with serving(lambda asked: b'data: {"error": {"message": "no"}}\n\n') as server:
        with pytest.raises(PeerFailed, match='"no"'):
            await server.stream(PROMPT, 3)
    async with serving(lambda asked: b"busy", "503 Service Unavailable") as server:
        with pytest.raises(PeerFailed, match="503: busy"):
            await server.stream(PROMPT, 3)


def prefilled(asked: dict[str, Any]) -> bytes:
    assert asked["max_tokens"] == 1
    assert asked["kv_transfer_params"] == {"do_remote_decode": True}
    params = {"remote_block_ids": [[7]], "remote_prefill_cached_tokens": 0}
    return json.dumps({"choices": [{"text": "a"}], "kv_transfer_params": params}).encode()


@pytest.mark.parametrize("cached_tokens", [0, 60])
async def test_a_pair_takes_the_kv_of_its_prefill_server_or_fails(tmp_path: Path, cached_tokens: int) -> None:
    def decoded(asked: dict[str, Any]) -> bytes:
        assert asked["kv_transfer_params"] == {"remote_block_ids": [[7]]}
        return streamed("a", "b", cached_tokens=cached_tokens)

    async with serving(prefilled) as prefill, serving(decoded) as decode:
        pair = VllmPair(prefill, decode, {"kv_transfer_params": {"do_remote_decode": True}}, 32, tmp_path)
        if cached_tokens:
            assert (await pair.stream(PROMPT, 2)).tokens == 2
        else:
            with pytest.raises(PeerFailed, match="KV of 64 tokens"):
                await pair.stream(PROMPT, 2)


@dataclass
class Recorded:
    """Writes what it is asked into a list that it shares with the other side."""

    name: str
    log: list[str]
    running: int = 0
    most: int = 0

    async def stream(self, prompt: Sequence[int], tokens: int) -> Stream:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.log.append(f"{self.name}{prompt[0]}")
        return Stream(0.0, (1.0, 2.0), 3.0, tokens, 0)

    def clear(self) -> None:
        self.log.append("clear")


async def test_sides_alternate_and_the_first_round_only_warms_up() -> None:
    log: list[str] = []
    sides = [Recorded("a", log), Recorded("b", log)]

    async def turn(side: Any, prompts: Prompts) -> int:
        await side.stream(prompts[0], 1)
        return prompts[0][0]

    assert await in_turns(sides, [[[0]], [[1]], [[2]]], turn, settle_s=0.0) == [[1, 2], [1, 2]]
    assert [each for each in log if each != "clear"] == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert log[1::2] == ["clear"] * 6


async def test_a_closed_loop_sends_every_prompt_and_so_many_at_a_time() -> None:
    side = Recorded("a", [])
    assert await closed_loop(side, [[number] for number in range(7)], 3, 5) > 0
    assert (len(side.log), side.most) == (7, 3)
