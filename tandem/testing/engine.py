"""Drives one engine in one process, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.config.engine import EngineSpec
from tandem.engine.api import EngineRequest, KvExporter, ScoredToken, StepResult
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank, build_rank
from tandem.errors import InternalError, TandemError
from tandem.kvcache.blockhash import HashKey
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.plan import ExportRange


class Exported:
    """What a rank was told to export. Everything is there when it is told."""

    def __init__(self) -> None:
        self.ranges: list[ExportRange] = []

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self.ranges += ranges

    def layer_done(self, layer: int) -> None:
        """Does nothing."""


class EagerRecorder:
    """A `GraphRecorder` that records nothing: each replay runs the work again. For devices without graphs."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class NoExport:
    """An exporter that ignores all calls."""

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """Does nothing."""

    def layer_done(self, layer: int) -> None:
        """Does nothing."""


@dataclass(slots=True)
class EngineDriver:
    """Runs an engine's steps and collects its output by request."""

    engine: TandemEngine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason | TandemError | None] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    scores: dict[str, list[ScoredToken]] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams, **options: object) -> None:
        self.engine.add(make_request(name, prompt, sampling, **options))

    def run(self, most_steps: int = 5000) -> None:
        """Runs steps until there is no work, and waits for batches that are collected."""
        for _ in range(most_steps):
            if (collecting_s := self.engine.collect()) is not None:
                time.sleep(collecting_s)
            elif not self.engine.has_work:
                return
            else:
                self.take(self.engine.step())
        raise InternalError("the engine still has work")

    def take(self, result: StepResult) -> None:
        for token in result.tokens:
            self.tokens.setdefault(token.request_id, []).append(token.token_id)
            if token.cached_tokens is not None:
                self.cached[token.request_id] = token.cached_tokens
            if token.embedding:
                self.embeddings[token.request_id] = token.embedding
        for part in result.prompt_scores:
            scores = self.scores.setdefault(part.request_id, [])
            if part.start != 1 + len(scores):
                raise InternalError(f"expected scores from position {1 + len(scores)} on, got {part.start}")
            scores.extend(part.tokens)
        for end in result.ended:
            self.ends[end.request_id] = end.error or end.reason

    def at_rest(self) -> bool:
        """Whether no block is leased or in use, and every block is accounted for."""
        load = self.engine.load()
        return load.host.conserved and load.blocks.conserved and load.blocks.leased == 0 and load.blocks.in_use == 0


def answer_that_moves(
    source: Rank,
    exported: Exported,
    drivers: tuple[EngineDriver, EngineDriver],
    target: Rank,
    request: EngineRequest,
    after: int,
) -> list[int]:
    """The tokens of an answer that goes from `source`, which exports to `exported`, to `target` once it has so many
    tokens or more."""
    first, second = drivers
    name, prompt, sampling = request.request_id, request.prompt, request.sampling
    first.engine.add(request)
    while len(first.tokens.get(name, ())) < after:
        first.take(first.engine.step())
    answer = first.tokens[name]
    if first.ends:
        return answer
    had = len(answer) - 1
    if not first.engine.hold(name):
        raise InternalError("expected a request that decodes")
    rest = replace(sampling, max_tokens=sampling.max_tokens - had)
    taken_over = make_request(name, [*prompt, *answer[:-1]], rest, answered_tokens=had)
    reservation = second.engine.reserve(taken_over)
    first.engine.export_held(name, 0)
    first.run()
    for told in exported.ranges:
        for logical, block in enumerate(told.block_ids, told.first_block):
            target.pool.tensor[reservation.block_ids[logical]] = source.pool.tensor[block]
    first.engine.cancel(name)
    second.engine.join(name, answer[-1])
    second.run()
    return [*answer, *second.tokens[name]]


def make_request(name: str, prompt: Sequence[int], sampling: SamplingParams, **options: object) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, HashKey("model"), **options)  # type: ignore[arg-type]


def single_rank(
    model_dir: Path,
    rendezvous: Path,
    exporter: KvExporter | None = None,
    paged: PagedPath | None = None,
    **spec: object,
) -> Rank:
    """The only rank of a worker, with its engine."""
    settings = {"kv_blocks": 128} | spec
    engine = EngineSpec.model_validate(settings)
    return build_rank(
        model_dir, engine, rank=0, size=1, rendezvous_file=rendezvous, exporter=exporter or NoExport(), paged=paged
    )
