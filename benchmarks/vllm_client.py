"""One client for every OpenAI-compatible server, so that its own time is the same for each, and turns between them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from cluster.cli.load.http_connection import HttpConnection

Prompts = list[list[int]]
T = TypeVar("T")

MODEL = "bench"
SETTLE_S = 1.5  # an idle vLLM polls for a second
ERROR_CHARS = 500  # of a server's error in ours


class PeerFailed(RuntimeError):
    """A server did not start, or did not do what is measured."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class Completion(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: msgspec.Raw | None = None


_COMPLETIONS = msgspec.json.Decoder(Completion)


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer as its client saw it, in seconds of `time.perf_counter`. `texts_s`: when each event with text came."""

    began_s: float
    texts_s: Sequence[float]
    ended_s: float
    tokens: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.texts_s[0] - self.began_s)

    @property
    def second_ms(self) -> float:
        """Until the second event, which comes from the decode side, whichever side sends the first."""
        return 1000 * (self.texts_s[1] - self.began_s)

    @property
    def per_token_ms(self) -> float:
        return 1000 * (self.ended_s - self.began_s) / self.tokens


class Side(Protocol):
    """What is measured: a server, or a pair of them."""

    async def stream(self, prompt: Sequence[int], tokens: int) -> Stream:
        """A greedy answer of exactly so many tokens."""
        ...

    def clear(self) -> None:
        """Removes what the requests so far left on the disk."""
        ...


class Server:
    """A server at `address`, such as 127.0.0.1:8000. Connections are opened on demand and kept."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[HttpConnection] = []

    async def answer(self, prompt: Sequence[int], tokens: int, extra: Mapping[str, object]) -> Completion:
        """A greedy answer as a whole. `extra`: further fields of the request."""
        body = bytearray()
        await self._post({**_request(prompt, tokens), **extra}, body.extend)
        return _decoded(bytes(body))

    async def stream(self, prompt: Sequence[int], tokens: int, extra: Mapping[str, object] | None = None) -> Stream:
        events = _Events()
        streamed: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
        began_s = time.perf_counter()
        await self._post({**_request(prompt, tokens), **streamed, **(extra or {})}, events.feed)
        return events.stream(began_s, time.perf_counter(), tokens)

    def clear(self) -> None:
        """Leaves nothing on the disk."""

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _post(self, fields: Mapping[str, object], on_body: Callable[[bytes], None]) -> None:
        """Raises PeerFailed, or UnavailableError if the connection is lost."""
        body = msgspec.json.encode(fields)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\ncontent-length: {len(body)}"
        raw = f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + body
        connection = await self._connection()
        refusal = bytearray()

        def take(data: bytes) -> None:
            if connection.status == 200:
                on_body(data)
            else:
                refusal.extend(data)

        try:
            status = await connection.send(raw, take)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()  # if cancelled too
        if status != 200:
            raise PeerFailed(f"expected HTTP 200, got {status}: {_shown(bytes(refusal))}")

    async def _connection(self) -> HttpConnection:
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        host, _, port = self._address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, host, int(port))
        return connection


class VllmPair:
    """vLLM's own pair, driven as by vLLM's example proxy, but without a proxy on the way: the prefill server answers
    with one token, which is discarded, and the decode server streams the whole answer."""

    def __init__(
        self, prefill: Server, decode: Server, asks: Mapping[str, object], computed_tokens: int, files: Path
    ) -> None:
        """`asks`: further fields of requests to the prefill server. `computed_tokens`: so many at the end of a prompt
        may the decode server compute itself. `files`: folder of the KV's files."""
        self._prefill, self._decode, self._asks = prefill, decode, asks
        self._computed_tokens, self._files = computed_tokens, files

    async def stream(self, prompt: Sequence[int], tokens: int) -> Stream:
        """Raises PeerFailed if the decode server did not take the KV."""
        began_s = time.perf_counter()
        first = await self._prefill.answer(prompt, 1, self._asks)
        params = first.kv_transfer_params or {}
        params.pop("remote_prefill_cached_tokens", None)  # else the decode server reports these as its own
        answer = await self._decode.stream(prompt, tokens, {"kv_transfer_params": params} if params else None)
        if answer.cached_tokens < len(prompt) - self._computed_tokens:
            raise PeerFailed(f"expected KV of {len(prompt)} tokens to be moved, got {answer.cached_tokens}")
        return replace(answer, began_s=began_s)

    def clear(self) -> None:
        for each in self._files.iterdir():
            shutil.rmtree(each)


async def in_turns(
    sides: Sequence[Side],
    rounds: Sequence[Prompts],
    turn: Callable[[Side, Prompts], Awaitable[T]],
    settle_s: float = SETTLE_S,
) -> list[list[T]]:
    """The results of each side, without the first round. In each round every side has a turn, in alternating order."""
    results: list[list[T]] = [[] for _ in sides]
    for number, prompts in enumerate(rounds):
        for index in range(len(sides))[:: -1 if number % 2 else 1]:
            await asyncio.sleep(settle_s)
            results[index].append(await turn(sides[index], prompts))
            sides[index].clear()
    return [found[1:] for found in results]


class _Events:
    """Parses a stream of server-sent events as it arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._texts_s: list[float] = []
        self._usage = _Usage()
        self._error = b""

    def feed(self, data: bytes) -> None:
        at_s = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._take(event, at_s)

    def _take(self, event: bytes, at_s: float) -> None:
        try:
            found = _decoded(event)
        except PeerFailed:
            self._error = event
            return
        self._usage = found.usage or self._usage
        if any(choice.text for choice in found.choices):
            self._texts_s.append(at_s)

    def stream(self, began_s: float, ended_s: float, tokens: int) -> Stream:
        """Raises PeerFailed if the answer is not whole."""
        if self._error:
            raise PeerFailed(f"expected an event of a completion, got {_shown(self._error)}")
        got, details = self._usage.completion_tokens, self._usage.prompt_tokens_details
        if got != tokens or len(self._texts_s) < min(2, tokens):
            raise PeerFailed(f"expected {tokens} tokens in two or more events, got {got} in {len(self._texts_s)}")
        cached = None if details is None else details.cached_tokens
        return Stream(began_s, tuple(self._texts_s), ended_s, got, cached or 0)


def _request(prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _decoded(data: bytes) -> Completion:
    try:
        found = _COMPLETIONS.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerFailed(f"expected a completion, got {_shown(data)}: {error}") from None
    if found.error is not None:
        raise PeerFailed(f"expected a completion, got {_shown(bytes(found.error))}")
    return found


def _shown(data: bytes) -> str:
    return data[:ERROR_CHARS].decode(errors="replace").strip()
