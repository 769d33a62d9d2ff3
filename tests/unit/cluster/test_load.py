"""The load generator against servers that do what they are told: scheduled times, shared prefixes, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import numpy as np
import pytest

from cluster.cli.load.client import LoadRequest, LoadResponse, OnTokens
from cluster.cli.load.openai_client import OpenAiClient, OpenAiEndpoint
from cluster.cli.load.player import LoadLimits, LoadResult, Player
from cluster.cli.load.prompts import Prompts
from planner.simulator.setup import Slo
from planner.traces.trace import PrefixBlocks, TrafficTrace
from tandem.errors import (
    ErrorCode,
    InputError,
    InternalError,
    OverloadedError,
    TandemError,
    Unauthenticated,
    UnavailableError,
)


def trace_of(arrivals: list[float], output: int = 3, prompt: int = 40) -> TrafficTrace:
    count = len(arrivals)
    return TrafficTrace("hand", np.array(arrivals), np.full(count, prompt), np.full(count, output))


@dataclass
class FakeServer:
    """Answers a token each `token_s`, one request at a time, as a server without batching would."""

    token_s: float = 0.01
    refuses: Callable[[LoadRequest], bool] = lambda ask: False
    asked: list[LoadRequest] = field(default_factory=list)
    answered: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, request: LoadRequest, on_tokens: OnTokens) -> LoadResponse:
        self.asked.append(request)
        if self.refuses(request):
            raise OverloadedError("no room")
        async with self.lock:
            for _ in range(request.output_tokens):
                await asyncio.sleep(self.token_s)
                on_tokens(1)
            self.answered += 1
        return LoadResponse(request.output_tokens, len(request.prompt))

    async def close(self) -> None: ...


async def play(
    trace: TrafficTrace, server: FakeServer, limits: LoadLimits | None = None, slo: Slo | None = None
) -> LoadResult:
    limits, slo = limits or LoadLimits(), slo or Slo()
    return await Player(trace, Prompts(trace, 1, 1000), server, slo, limits).play("fake")


class TestPlayer:
    async def test_a_stall_counts_for_every_request_that_was_due_meanwhile(self) -> None:
        """A closed loop would have sent the second one only after the first, and seen no wait."""
        result = await play(trace_of([0.0, 0.0, 0.0, 0.0], output=2), FakeServer(token_s=0.05))
        assert result.finished == 4
        assert result.ttft_s.p99 is not None
        assert result.ttft_s.p99 > 0.33  # three others before it, 0.1 s each

    async def test_waiting_for_a_connection_is_latency_and_is_said(self) -> None:
        one_by_one = LoadLimits(connections=1)
        result = await play(trace_of([0.0, 0.0, 0.0], output=2), FakeServer(token_s=0.05), one_by_one)
        assert result.send_lag_s.p99 is not None
        assert result.send_lag_s.p99 > 0.15
        assert result.e2e_s.p99 is not None
        assert result.e2e_s.p99 > 0.28
        assert any("late" in note for note in result.notes)

    async def test_refused_and_failed_requests_are_counted_and_miss_their_objectives(self) -> None:
        server = FakeServer(refuses=lambda ask: len(server.asked) % 2 == 0)
        result = await play(trace_of([0.0, 0.01, 0.02, 0.03]), server, slo=Slo(10.0, 10.0))
        assert (result.finished, result.rejected, result.failed) == (2, 2, 0)
        assert result.refusals == {"overloaded": 2}
        assert result.attainment.joint == 0.5

    async def test_an_answer_that_takes_too_long_fails(self) -> None:
        result = await play(trace_of([0.0], output=1), FakeServer(token_s=5.0), LoadLimits(timeout_s=0.1))
        assert result.failed == 1
        assert result.refusals == {ErrorCode.DEADLINE_EXCEEDED.value: 1}

    async def test_a_class_that_would_break_a_header_is_refused_before_anything_is_sent(self) -> None:
        server, trace = FakeServer(), replace(trace_of([0.0]), labels=(("x\r\nhost: other", ""),))
        with pytest.raises(InputError, match="class: expected letters"):
            await play(trace, server)
        assert not server.asked

    async def test_an_interrupted_run_reports_what_was_due(self) -> None:
        server, trace = FakeServer(), trace_of([0.0, 0.0, 600.0])
        task = asyncio.ensure_future(play(trace, server))
        async with asyncio.timeout(60):
            while server.answered < 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        task.cancel()
        result = await task
        assert (result.requests, result.finished, result.complete) == (2, 2, False)


class TestPrompts:
    trace = TrafficTrace(
        "shared",
        np.array([0.0, 1.0, 2.0]),
        np.array([40, 50, 20]),
        np.array([1, 1, 1]),
        PrefixBlocks(16, np.array([7, 8, 7, 9, 7, 8]), np.array([2, 4, 6])),
    )

    @pytest.mark.parametrize("vocab", [1000, None])
    def test_requests_share_what_the_trace_says_and_nothing_else(self, vocab: int | None) -> None:
        prompts = Prompts(self.trace, 5, vocab)
        first, second, third = (self._items(prompts.of(index)) for index in range(3))
        assert [len(each) for each in (first, second, third)] == [40, 50, 20]
        assert first[:16] == second[:16] == third[:16]
        assert first[16:20] == third[16:20]
        assert first[16:32] != second[16:32]
        assert first[32:40] != second[32:40]

    def test_another_salt_gives_other_prompts_and_the_same_one_the_same(self) -> None:
        texts = [Prompts(self.trace, salt, 1000).of(0) for salt in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]

    @staticmethod
    def _items(prompt: list[int] | str) -> list[object]:
        return list(prompt.split()) if isinstance(prompt, str) else list(prompt)


Serve = Callable[[bytes, asyncio.StreamWriter], None]


@asynccontextmanager
async def http_server(serve: Serve, *, keep: bool = True) -> AsyncIterator[OpenAiEndpoint]:
    open_connections: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                serve(head + await reader.readexactly(length), writer)
                await writer.drain()
                if not keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            open_connections.discard(writer)
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield OpenAiEndpoint(urlsplit(f"http://127.0.0.1:{port}/v1"), "m", chat=False, api_key="key")
    finally:
        server.close()
        for writer in open_connections:
            writer.close()
        await asyncio.sleep(0)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def answer_of(*events: bytes, status: str = "200 OK", cut: bool = False) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in events)
    end = b"" if cut else b"0\r\n\r\n"
    return f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode() + body + end


WHOLE = (
    event(choices=[{"text": "a", "index": 0}]),
    event(choices=[{"text": "b", "index": 0}]),
    event(usage={"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}),
    b"data: [DONE]\n\n",
)


class TestOpenAiClient:
    async def test_tokens_are_heard_and_usage_is_told_over_one_kept_connection(self) -> None:
        seen: list[bytes] = []
        connections: set[int] = set()

        def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
            seen.append(request)
            connections.add(id(writer))
            writer.write(answer_of(*WHOLE))

        async with http_server(serve) as endpoint:
            client = OpenAiClient(endpoint)
            heard: list[int] = []
            for _ in range(2):
                answer = await client.send(LoadRequest([1, 2, 3], 2, "batch"), heard.append)
            await client.close()
        assert answer == LoadResponse(2, 5, 4)
        assert sum(heard) == 4
        assert len(connections) == 1
        body = json.loads(seen[0].split(b"\r\n\r\n")[1])
        assert body["prompt"] == [1, 2, 3]
        assert (body["stream"], body["ignore_eos"]) == (True, True)
        assert b"authorization: Bearer key\r\n" in seen[0]
        assert b"x-tandem-priority: batch" in seen[0]

    @pytest.mark.parametrize(
        ("reply", "error"),
        [
            (answer_of(b'{"error": "slow down"}', status="429 Too Many"), OverloadedError),
            (answer_of(b"no key", status="401 Unauthorized"), Unauthenticated),
            (answer_of(b"", status="503 No"), UnavailableError),
            (answer_of(WHOLE[0], event(error={"message": "broken"})), InternalError),
            (answer_of(b"data: no json\n\n"), InternalError),
            (b"SSH-2.0-something\r\n", UnavailableError),
            (b"", UnavailableError),
            (answer_of(WHOLE[0], cut=True), UnavailableError),
        ],
    )
    async def test_what_a_server_may_do_wrong_has_a_name(self, reply: bytes, error: type[TandemError]) -> None:
        async with http_server(lambda request, writer: writer.write(reply), keep=False) as endpoint:
            client = OpenAiClient(endpoint)
            with pytest.raises(error):
                await client.send(LoadRequest("text", 2), lambda tokens: None)
            await client.close()

    async def test_a_kept_connection_that_the_server_gave_up_costs_no_request(self) -> None:
        async with http_server(lambda request, writer: writer.write(answer_of(*WHOLE)), keep=False) as endpoint:
            client = OpenAiClient(endpoint)
            for _ in range(3):
                assert (await client.send(LoadRequest([1], 2), lambda tokens: None)).output_tokens == 2
            await client.close()

    async def test_nobody_there_is_said(self) -> None:
        endpoint = OpenAiEndpoint(urlsplit("http://127.0.0.1:1/v1"), "m", chat=True)
        with pytest.raises(UnavailableError, match="cannot connect to"):
            await OpenAiClient(endpoint).send(LoadRequest("hello", 1), lambda tokens: None)
