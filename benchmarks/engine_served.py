"""What one prefill and one decode worker make of an engine: streams through router, handoff and decode."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from benchmarks.live_cluster import live, spec_of
from cluster.cli.load.client import Answer, Ask, Client
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.openai_client import Endpoint, OpenAiClient

NAME = "served"
T = TypeVar("T")


class ServedPair:
    """One prefill and one decode worker with engines of that `mode`, and a router. Its event loop has a thread of its
    own, so that the cluster lives on while others are measured."""

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
        self._held = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._held.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens a second of all prompts together, from when each has one until one has all. The prefill worker knows
        the prompts before, so that all are soon handed off and decode together."""
        known = self._wait(self._answer_all(self._grpc, [Ask(prompt, 1) for prompt in prompts]))
        if not all(answer.handed_off for answer, _ in known):
            raise RuntimeError("expected every prompt to be handed off")
        while (rate := self._common_rate(prompts, tokens)) is None:
            tokens *= 2  # one answer ended before another began; the server refuses more than the context holds
        return rate

    def _common_rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float | None:
        """None where no moment has all answers under way."""
        answers = self._wait(self._answer_all(self._http, [Ask(prompt, tokens) for prompt in prompts]))
        streams = [came_s for _, came_s in answers]
        begins, ends = max(stream[0] for stream in streams), min(stream[-1] for stream in streams)
        if begins >= ends:
            return None
        return sum(begins < at <= ends for stream in streams for at in stream) / (ends - begins)

    async def _start(self) -> None:
        controller = await self._held.enter_async_context(live(self._spec))
        address = controller.grpc_address
        self._grpc = GrpcClient(address, None, tls=False, model="", api_key=None, ignore_eos=True)
        self._held.push_async_callback(self._grpc.close)
        url = urlsplit(f"http://{controller.http_address}/v1")
        self._http = OpenAiClient(Endpoint(url, NAME, chat=False))
        self._held.push_async_callback(self._http.close)

    async def _answer_all(self, client: Client, asks: Sequence[Ask]) -> list[tuple[Answer, list[float]]]:
        return await asyncio.gather(*(self._answer(client, ask) for ask in asks))

    async def _answer(self, client: Client, ask: Ask) -> tuple[Answer, list[float]]:
        """And when each token came."""
        came_s: list[float] = []
        answer = await client.send(ask, lambda tokens: came_s.extend([time.perf_counter()] * tokens))
        return answer, came_s

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
