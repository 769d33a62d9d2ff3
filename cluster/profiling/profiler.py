"""Measures the steps of one engine on this hardware, without the rest of a worker."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from planner.fitted import DecodePoint, PrefillPoint
from tandem.config.engine import EngineSpec
from tandem.engine.api import EngineRequest, ExportRange
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank, build_rank
from tandem.errors import ConfigError
from tandem.grammar.constraint import regex
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.scheduler.scheduler import Scheduler

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 4096)
CHUNKS_OF_A_PROMPT = 4  # measures each chunk size after contexts of several lengths
REPEATS = 3
DECODE_STEPS = 6
MIXED_BATCH, MIXED_PROMPT, MIXED_STEPS = 4, 64, 8  # about as much time for prompts as for decodes

MASKED_BATCH, MASKED_STEPS, MASK_RUNS = 16, 8, 3
# Letters and digits only, and so many that nothing is forced and no answer ends within the steps.
MASK_GRAMMAR = regex("[a-zA-Z0-9 ]{200,400}", "grammar").grammar


@dataclass(frozen=True, slots=True)
class Grid:
    chunks: tuple[int, ...] = CHUNKS
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS


class _NullExporter:
    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """Exports nothing."""

    def layer_done(self, layer: int) -> None:
        """Exports nothing."""


@contextmanager
def build_alone(folder: Path, spec: EngineSpec) -> Iterator[Rank]:
    """Builds a single rank. Raises ConfigError, CheckpointError."""
    if spec.kind != "tandem":
        raise ConfigError("engine.kind: expected tandem: other engines cannot be profiled yet", field="engine.kind")
    with tempfile.TemporaryDirectory() as scratch:
        yield build_rank(
            folder, spec, rank=0, size=1, rendezvous_file=Path(scratch) / "rendezvous", exporter=_NullExporter()
        )


class Profiler:
    """Medians of the step times of one engine, in seconds. Each chunk budget gets a new scheduler."""

    def __init__(self, rank: Rank, spec: EngineSpec, grid: Grid) -> None:
        self._rank, self._spec, self._grid = rank, spec, grid
        self._numbers = count()
        self._capacity = rank.layout.num_blocks * rank.layout.block_tokens

    def prefills(self, report: Callable[[str], None]) -> list[PrefillPoint]:
        longest = min(self._rank.max_model_tokens - 2, self._capacity - 2)
        found = []
        for chunk in self._grid.chunks:
            chunks = min(CHUNKS_OF_A_PROMPT, longest // chunk)
            seconds: dict[int, list[float]] = defaultdict(list)
            for _ in range(REPEATS if chunks else 0):
                engine = self._engine(chunk)
                self._add(engine, chunk * chunks, output_tokens=1)
                for number in range(chunks):
                    seconds[number * chunk].append(_timed(engine))
            found += [PrefillPoint(chunk, context, statistics.median(took)) for context, took in seconds.items()]
            report(f"prefill, chunks of {chunk}: {chunks} contexts")
        return found

    def decodes(self, report: Callable[[str], None]) -> list[DecodePoint]:
        found = []
        for batch, context in self._decode_grid():
            engine = self._engine(batch * context)
            for _ in range(batch):
                self._add(engine, context, output_tokens=DECODE_STEPS + 2)
            engine.step()  # prefills all prompts
            took = statistics.median(_timed(engine) for _ in range(DECODE_STEPS))
            found.append(DecodePoint(batch, batch * (context + DECODE_STEPS // 2), took))
            report(f"decode, {batch} requests of {context} tokens: {1000 * took:.2f} ms")
        if not found:
            raise ConfigError(
                f"engine.kv_memory_bytes: {self._capacity} tokens of KV are too few to profile: raise it",
                field="engine.kv_memory_bytes",
            )
        return found

    def mask_s_per_row(self, report: Callable[[str], None]) -> float | None:
        """Seconds that a row with a grammar adds to a decode step; None if the model's vocabulary takes no grammar."""
        engine = self._rank.engine  # only this one has a compiler of grammars
        batch = max(1, min(MASKED_BATCH, self._spec.max_running_requests, self._capacity // (2 * MIXED_PROMPT)))
        took: dict[str | None, list[float]] = {None: [], MASK_GRAMMAR: []}
        for grammar in (None, MASK_GRAMMAR) * MASK_RUNS:
            for _ in range(batch):
                self._add(engine, MIXED_PROMPT // 2, output_tokens=3 * MASKED_STEPS, grammar=grammar)
            ended = [end for _ in range(MASKED_STEPS) for end in engine.step().ended]  # prompts, compiling, first masks
            took[grammar] += [_timed(engine) for _ in range(MASKED_STEPS // 2)]
            while engine.has_work:
                engine.step()
            if any(end.error is not None for end in ended):
                report("masks not measured: no grammar can be used with this vocabulary")
                return None
        masks_s = max(0.0, statistics.median(took[MASK_GRAMMAR]) - statistics.median(took[None])) / batch
        report(f"masks: {masks_s * 1e6:.1f} µs for each constrained row")
        return masks_s

    def mixed_s(self) -> float:
        """Seconds for one step with several prompts and the decode steps that follow."""
        longest = min(self._rank.max_model_tokens - MIXED_STEPS - 2, self._capacity // MIXED_BATCH - MIXED_STEPS - 2)
        engine = self._engine(MIXED_BATCH * MIXED_PROMPT)
        for _ in range(MIXED_BATCH):
            self._add(engine, max(1, min(MIXED_PROMPT, longest)), output_tokens=MIXED_STEPS + 1)
        return sum(_timed(engine) for _ in range(MIXED_STEPS + 1))

    def _decode_grid(self) -> Iterator[tuple[int, int]]:
        """(batch, context) pairs that fit the KV pool and the model's context."""
        block = self._rank.layout.block_tokens
        for batch in self._grid.batches:
            for context in self._grid.contexts:
                needed = context + DECODE_STEPS + 2 + block
                if batch * needed <= self._capacity and needed < self._rank.max_model_tokens:
                    yield batch, context

    def _engine(self, step_tokens: int) -> TandemEngine:
        scheduler = Scheduler(
            BlockPool(self._rank.layout.num_blocks),
            block_tokens=self._rank.layout.block_tokens,
            max_running_requests=max(self._grid.batches),
            max_step_tokens=step_tokens,
            max_model_tokens=self._rank.max_model_tokens,
        )
        return TandemEngine(self._rank.runner, scheduler, self._rank.config.vocab_size, None)

    def _add(self, engine: TandemEngine, prompt_tokens: int, output_tokens: int, grammar: str | None = None) -> None:
        number = next(self._numbers)
        vocab = self._rank.config.vocab_size
        prompt = tuple((number + 7 * position) % vocab for position in range(prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, grammar=grammar)
        engine.add(EngineRequest(str(number), prompt, sampling, HashKey("profile"), use_prefix_cache=False))


def _timed(engine: TandemEngine) -> float:
    """Seconds of one step. It ends with the logits on the host, so no device work is still running."""
    started_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - started_s
