"""Engines alone on this machine, without the rest of a worker, for measuring."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem.config.engine import EngineSpec
from tandem.config.launch import WorkerLaunch
from tandem.config.model import ModelSpec, Role
from tandem.config.transfer import TransferSpec
from tandem.engine.api import Engine
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank, build_rank
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.layout import KvPoolLayout
from tandem.scheduler.plan import ExportRange
from tandem.scheduler.scheduler import Scheduler
from tandem.vllm_engine.launch import build_vllm_rank

if TYPE_CHECKING:
    from tandem.vllm_engine.rank import VllmRank

# How much of a prompt vLLM plans in a step, but not how long a step takes.
_VLLM_CHUNKS = ("enable_chunked_prefill", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive")


class MeasuredEngine(Protocol):
    """One engine, whose steps can be given any size up to `most_step_tokens`."""

    @property
    def layout(self) -> KvPoolLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_tokens(self) -> int: ...

    @property
    def most_step_tokens(self) -> int | None:
        """None: all that the pool holds."""
        ...

    @property
    def constrained(self) -> Engine:
        """The engine with a compiler of grammars."""
        ...

    def engine(self, step_tokens: int) -> Engine:
        """An empty engine that computes at most so many tokens in a step. No other one is used after this call."""
        ...


class _NullExporter:
    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """Exports nothing."""

    def layer_done(self, layer: int) -> None:
        """Exports nothing."""


class _Tandem:
    most_step_tokens = None

    def __init__(self, rank: Rank, most_requests: int) -> None:
        self.layout = rank.layout
        self.vocab_size = rank.config.vocab_size
        self.max_model_tokens = rank.max_model_tokens
        self._rank = rank
        self._most_requests = most_requests

    @property
    def constrained(self) -> Engine:
        return self._rank.engine

    def engine(self, step_tokens: int) -> Engine:
        scheduler = Scheduler(
            BlockPool(self.layout.num_blocks),
            block_tokens=self.layout.block_tokens,
            max_running_requests=self._most_requests,
            max_step_tokens=step_tokens,
            max_model_tokens=self.max_model_tokens,
        )
        return TandemEngine(self._rank.runner, scheduler, self.vocab_size, None)


class _Vllm:
    def __init__(self, rank: VllmRank, most_step_tokens: int) -> None:
        self.layout = rank.layout
        self.vocab_size = rank.engine.vocab_size
        self.max_model_tokens = rank.max_model_tokens
        self.most_step_tokens = most_step_tokens
        self._engine = rank.engine

    @property
    def constrained(self) -> Engine:
        return self.engine(self.most_step_tokens)

    def engine(self, step_tokens: int) -> Engine:
        while self._engine.has_work:
            self._engine.step()
        self._engine.limit_steps(min(step_tokens, self.most_step_tokens))
        return self._engine


@contextmanager
def build_alone(folder: Path, spec: EngineSpec) -> Iterator[Rank]:
    """Builds a single rank of Tandem's engine. Raises ConfigError, CheckpointError."""
    with tempfile.TemporaryDirectory() as scratch:
        yield build_rank(
            folder, spec, rank=0, size=1, rendezvous_file=Path(scratch) / "rendezvous", exporter=_NullExporter()
        )


@contextmanager
def measured_engine(
    folder: Path, spec: EngineSpec, *, most_requests: int, most_step_tokens: int
) -> Iterator[MeasuredEngine]:
    """Builds a single rank of either engine, for so many requests and tokens in a step. Raises ConfigError,
    CheckpointError, InsufficientMemory."""
    if spec.kind == "tandem":
        with build_alone(folder, spec) as rank:
            yield _Tandem(rank, most_requests)
        return
    most_step_tokens += most_requests  # prompts go on beside all of them
    own = {name: value for name, value in spec.vllm.items() if name not in _VLLM_CHUNKS}
    limits = {"max_running_requests": most_requests, "max_step_tokens": most_step_tokens, "vllm": own}
    engine = spec.model_copy(update=limits)
    with tempfile.TemporaryDirectory() as scratch:
        launch = WorkerLaunch(
            cluster="profile",
            worker_id="profile",
            epoch=1,
            role=Role.DECODE,
            model=ModelSpec(source=str(folder), engine=engine),
            engine=engine,
            model_dir=str(folder),
            transfer=TransferSpec(),
            controller_address="none",
            redis_url=None,
            run_dir=scratch,
        )
        vllm = build_vllm_rank(launch, 0, _NullExporter())
        try:
            yield _Vllm(vllm, most_step_tokens)
        finally:
            vllm.close()
