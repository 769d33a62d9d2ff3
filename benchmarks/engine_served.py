"""One prefill and one decode worker with the engine to measure: streams through router, handoff and decode."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from benchmarks.live_cluster import live, spec_of
from cluster.cli.load.client import LoadClient, LoadRequest, LoadResponse
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.openai_client import OpenAiClient, OpenAiEndpoint

NAME = "served"
ATTEMPTS = 4  # each with twice the tokens of the one before, until all answers overlap
T = TypeVar("T")


class ServedPair:
    """One prefill and one decode worker with engine options `mode`, and a router. The event loop has its own thread, so
    the cluster keeps running while other engines are measured."""

    def __init__(self, folder: Path, threads: int, mode: Mapping[str, object]) -> None:
        changes = {
            "models.0.source": str(folder),
            "models.0.name": NAME,
            "models.0.engine.threads_per_rank": threads,
            "router.disaggregation": "always",
            "name": f"bench-{os.getpid()}-{'-'.join(str(option) for option in mode.values())}",
            **{f"models.0.engine.{name}": option for name, option in mode.items()},
        }
        self._spec = spec_of(1, 1, changes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._resources = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._resources.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens per second of all prompts together, from when every answer has begun until the first one ends. The
        prefill worker has the prompts cached before, so all of them are soon handed off and decode together."""
        cached = self._wait(self._answer_all(self._grpc, [LoadRequest(prompt, 2) for prompt in prompts]))
        if not all(answer.handed_off for answer, _ in cached):
            raise RuntimeError("served: expected every prompt to be handed off, got some that were not")
        for attempt in range(ATTEMPTS):
            asks = [LoadRequest(prompt, tokens << attempt) for prompt in prompts]
            streams = [token_times_s for _, token_times_s in self._wait(self._answer_all(self._http, asks))]
            begins, ends = max(stream[0] for stream in streams), min(stream[-1] for stream in streams)
            if begins < ends:
                return sum(begins < at <= ends for stream in streams for at in stream) / (ends - begins)
        raise RuntimeError(f"served: expected all answers to overlap, got none that do in {ATTEMPTS} attempts")

    def times(self, streams: Sequence[Sequence[LoadRequest]], seconds: float | None) -> list[list[float]]:
        """When the tokens of each answer arrived in that time. Each stream asks its questions in turn, again and
        again; without `seconds` each question once."""
        return self._wait(self._times(streams, seconds))

    async def _times(self, streams: Sequence[Sequence[LoadRequest]], seconds: float | None) -> list[list[float]]:
        answers: list[list[float]] = []

        async def ask_on(asks: Sequence[LoadRequest]) -> None:
            for ask in asks if seconds is None else cycle(asks):
                answers.append([])
                await self._answer(self._http, ask, answers[-1])

        asking = [asyncio.create_task(ask_on(asks)) for asks in streams]
        failed, _ = await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for task in failed:
            task.result()
        return answers

    async def _start(self) -> None:
        cluster = await self._resources.enter_async_context(live(self._spec))
        address = cluster.grpc_address
        self._grpc = GrpcClient(address, None, tls=False, model="", api_key=None, ignore_eos=True)
        self._resources.push_async_callback(self._grpc.close)
        url = urlsplit(f"http://{cluster.http_address}/v1")
        self._http = OpenAiClient(OpenAiEndpoint(url, NAME, chat=False))
        self._resources.push_async_callback(self._http.close)

    async def _answer_all(
        self, client: LoadClient, asks: Sequence[LoadRequest]
    ) -> list[tuple[LoadResponse, list[float]]]:
        return await asyncio.gather(*(self._answer(client, ask) for ask in asks))

    async def _answer(
        self, client: LoadClient, ask: LoadRequest, token_times_s: list[float] | None = None
    ) -> tuple[LoadResponse, list[float]]:
        """The answer, and the arrival time of each token, which `token_times_s` gets as it comes."""
        token_times_s = [] if token_times_s is None else token_times_s
        answer = await client.send(ask, lambda tokens: token_times_s.extend([time.perf_counter()] * tokens))
        return answer, token_times_s

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
