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

import grpc

from benchmarks.live_cluster import live, spec_of
from tandem.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")


class ServedPair:
    """One prefill and one decode worker with engines of that `mode`, and a router. Its event loop has a thread of its
    own, so that the cluster lives on while others are measured."""

    def __init__(self, folder: Path, threads: int, mode: Mapping[str, object]) -> None:
        changes = {
            "models.0.source": str(folder),
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
        self._stub = self._wait(self._start())
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
        self._wait(self._answer_all(prompts, 1))
        streams = self._wait(self._answer_all(prompts, tokens))
        begins, ends = max(stream[0] for stream in streams), min(stream[-1] for stream in streams)
        if begins >= ends:
            raise RuntimeError("a request ended before all had begun: ask for more tokens")
        return sum(begins < at <= ends for stream in streams for at in stream) / (ends - begins)

    async def _start(self) -> inference_pb2_grpc.InferenceAsyncStub:
        controller = await self._held.enter_async_context(live(self._spec))
        channel = await self._held.enter_async_context(grpc.aio.insecure_channel(controller.grpc_address))
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        return stub

    async def _answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        return await asyncio.gather(*(self._answer(prompt, tokens) for prompt in prompts))

    async def _answer(self, prompt: Sequence[int], tokens: int) -> list[float]:
        """When each token came."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        )
        came: list[float] = []
        async for response in self._stub.Generate(request):
            came += [time.perf_counter()] * len(response.chunk.token_ids)
            if response.HasField("finished") and not response.finished.timeline.prefill_worker:
                raise RuntimeError("expected every prompt to be handed off")
        return came

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
