"""What the router's frames do on a worker, between two of its steps: the engine's side of worker.service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from planner.simulator.events import EventLoop
from planner.simulator.recorder import Recorder
from planner.simulator.requests import SimRequest
from planner.simulator.sequence import BlockNames, SimSequence, TokenCount
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker
from tandem.errors import KvExhausted, TandemError
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams

_KEY = HashKey("simulated")


class FramesHost(Protocol):
    """The router, which hears of it one network time later."""

    def is_over(self, request: SimRequest, attempt: int) -> bool: ...
    def later(self, handle: Callable[..., None], *args: object) -> None: ...
    def fail(self, request: SimRequest, attempt: int, error: TandemError) -> None: ...
    def refused(self, request: SimRequest, attempt: int, refusal: TandemError) -> None: ...
    def reserved(self, request: SimRequest, attempt: int) -> None: ...
    def joined(self, moved_tokens: int, exposed_s: float) -> None: ...


class Frames:
    def __init__(self, host: FramesHost, setup: Setup, loop: EventLoop, recorder: Recorder, names: BlockNames) -> None:
        self._host, self._setup, self._loop, self._recorder, self._names = host, setup, loop, recorder, names
        self._arrivals = 0

    def generate(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._host.is_over(request, attempt):
            return
        sequence = request.sequence = self._sequence(request)
        try:
            worker.scheduler.add(sequence)
        except TandemError as error:
            self._host.later(self._host.fail, request, attempt, error)

    def reserve(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._host.is_over(request, attempt):
            return
        sequence = self._sequence(request)
        try:
            cached_blocks = worker.scheduler.reserve(sequence)
        except KvExhausted as refusal:
            self._host.later(self._host.refused, request, attempt, refusal)
            return
        except TandemError as error:
            self._host.later(self._host.fail, request, attempt, error)
            return
        request.sequence, request.cached_blocks = sequence, cached_blocks
        self._host.later(self._host.reserved, request, attempt)

    def prefill(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._host.is_over(request, attempt):
            return
        if request.cached_blocks * self._setup.block_tokens >= request.prompt_tokens:
            request.landed_s = self._loop.now_s()  # nothing to send: only the first token is wanted
        try:
            worker.scheduler.add(self._sequence(request, export_from_block=request.cached_blocks))
        except TandemError as error:
            self._host.later(self._host.fail, request, attempt, error)

    def join(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        sequence = request.sequence
        if self._host.is_over(request, attempt) or sequence is None or request.first_token_s is None:
            return
        worker.scheduler.join(sequence.request_id, 0)
        sequence.last_token_s = request.first_token_s
        request.lifecycle.start_decode()
        exposed_s = max(0.0, self._loop.now_s() - request.first_token_s)
        moved = request.prompt_tokens - request.cached_blocks * self._setup.block_tokens
        self._host.joined(moved, exposed_s)

    def cancel(self, request: SimRequest, worker: SimWorker, sequence_id: str) -> None:
        worker.scheduler.cancel(sequence_id)

    def release_export(self, request: SimRequest, worker: SimWorker, sequence_id: str) -> None:
        if sequence_id in worker.scheduler.sequences:
            worker.scheduler.release_export(sequence_id)

    def _sequence(self, request: SimRequest, export_from_block: int | None = None) -> SimSequence:
        self._arrivals += 1
        tokens = TokenCount(request.prompt_tokens)
        return SimSequence(
            request_id=request.sequence_id,
            tokens=tokens,
            prompt_tokens=request.prompt_tokens,
            sampling=SamplingParams(max_tokens=request.output_tokens),
            hash_key=_KEY,
            block_tokens=self._setup.block_tokens,
            arrival=self._arrivals,
            use_prefix_cache=self._setup.caches,
            export_from_block=export_from_block,
            index=request.index,
            maker=self._names,
            counted=tokens,
            last_token_s=self._last_token_s(request),
            _hashes=request.block_hashes,
        )

    def _last_token_s(self, request: SimRequest) -> float:
        """Of one that goes on elsewhere; 0 before its first token."""
        return float(self._recorder.last_token_s[request.index]) if request.migrations else 0.0
