"""Measures the steps of one engine on this hardware, without the rest of a worker."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from cluster.profiling.measured import MeasuredEngine, measured_engine
from planner.fitted import DecodePoint, MixedPoint, PrefillPoint
from tandem.config.engine import EngineSpec
from tandem.engine.api import Engine, EngineRequest, StepResult
from tandem.errors import ConfigError
from tandem.grammar.constraint import regex
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 4096)
CHUNKS_OF_A_PROMPT = 4  # measures each chunk size after contexts of several lengths
REPEATS = 3
DECODE_STEPS = 6
BESIDE_CHUNKS, BESIDE_BATCHES, BESIDE_CONTEXT = (16, 64, 256), (2, 8), 64
MIXED_BATCH, MIXED_PROMPT, MIXED_STEPS = 4, 64, 8  # about as much time for prompts as for decodes

MASKED_BATCH, MASKED_STEPS, MASK_RUNS = 16, 8, 3
# Letters and digits only, and so many that nothing is forced and no answer ends within the steps.
MASK_GRAMMAR = regex("[a-zA-Z0-9 ]{200,400}", "grammar").grammar


@dataclass(frozen=True, slots=True)
class Grid:
    chunks: tuple[int, ...] = CHUNKS
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS


@contextmanager
def open_profiler(folder: Path, spec: EngineSpec, grid: Grid) -> Iterator[Profiler]:
    """Raises ConfigError, CheckpointError, InsufficientMemory."""
    most_requests, most_step_tokens = max(grid.batches), max(grid.chunks)
    with measured_engine(folder, spec, most_requests=most_requests, most_step_tokens=most_step_tokens) as measured:
        yield Profiler(measured, spec, grid)


class Profiler:
    """Medians of the step times of one engine, in seconds."""

    def __init__(self, measured: MeasuredEngine, spec: EngineSpec, grid: Grid) -> None:
        self._measured, self._spec, self._grid = measured, spec, grid
        self._numbers = count()
        self._capacity = measured.layout.num_blocks * measured.layout.block_tokens

    def prefills(self, report: Callable[[str], None]) -> list[PrefillPoint]:
        longest = min(self._measured.max_model_tokens - 2, self._capacity - 2)
        found = []
        for chunk in self._grid.chunks:
            chunks = min(CHUNKS_OF_A_PROMPT, longest // chunk)
            seconds: dict[int, list[float]] = defaultdict(list)
            for _ in range(REPEATS if chunks else 0):
                engine = self._measured.engine(chunk)
                self._add(engine, chunk * chunks, output_tokens=1)
                for number in range(chunks):
                    seconds[number * chunk].append(_timed(engine))
            found += [PrefillPoint(chunk, context, statistics.median(took)) for context, took in seconds.items()]
            report(f"prefill, chunks of {chunk}: {chunks} contexts")
        return found

    def decodes(self, report: Callable[[str], None]) -> list[DecodePoint]:
        found = []
        for batch, context in self._decode_grid():
            engine = self._measured.engine(batch * context)
            begun = self._begin(engine, batch, context, DECODE_STEPS)
            took = statistics.median(_timed(engine) for _ in range(DECODE_STEPS))
            found.append(DecodePoint(batch, begun + batch * (DECODE_STEPS // 2), took))
            report(f"decode, {batch} requests of {context} tokens: {1000 * took:.2f} ms")
        if not found:
            raise ConfigError(
                f"engine.kv_memory_bytes: {self._capacity} tokens of KV are too few to profile: raise it",
                field="engine.kv_memory_bytes",
            )
        return found

    def mixed(self, report: Callable[[str], None]) -> list[MixedPoint]:
        """Steps in which a prompt is computed beside answers."""
        found = []
        for batch in BESIDE_BATCHES:
            for chunk in BESIDE_CHUNKS:
                needed = batch * (2 * BESIDE_CONTEXT + 4 * REPEATS) + 2 * chunk
                fits = (
                    max(2 * BESIDE_CONTEXT, chunk + 2) <= self._measured.max_model_tokens and needed <= self._capacity
                )
                if not fits or batch >= max(self._grid.batches) or chunk > max(self._grid.chunks):
                    continue
                engine = self._measured.engine(max(batch * BESIDE_CONTEXT, batch + chunk))
                begun, took = self._begin(engine, batch, BESIDE_CONTEXT, 3 * REPEATS), list[float]()
                for _ in range(REPEATS):
                    _step(engine)  # without a prompt
                    self._add(engine, chunk, output_tokens=1)
                    took.append(_timed(engine))
                found.append(MixedPoint(chunk, batch, begun + batch * REPEATS, statistics.median(took)))
        report(f"prompts beside answers: {len(found)} steps")
        return found

    def mask_s_per_row(self, report: Callable[[str], None]) -> float | None:
        """Seconds that a row with a grammar adds to a decode step; None if the model's vocabulary takes no grammar."""
        engine = self._measured.constrained
        batch = max(1, min(MASKED_BATCH, self._spec.max_running_requests, self._capacity // (2 * MIXED_PROMPT)))
        took: dict[str | None, list[float]] = {None: [], MASK_GRAMMAR: []}
        for grammar in (None, MASK_GRAMMAR) * MASK_RUNS:
            for _ in range(batch):
                self._add(engine, MIXED_PROMPT // 2, output_tokens=3 * MASKED_STEPS, grammar=grammar)
            try:
                for _ in range(MASKED_STEPS):  # prompts, compiling, first masks
                    _step(engine)
                took[grammar] += [_timed(engine) for _ in range(MASKED_STEPS // 2)]
            except ConfigError as error:
                report(f"masks not measured: {error.message}")
                return None
            finally:
                while engine.has_work:
                    engine.step()
        masks_s = max(0.0, statistics.median(took[MASK_GRAMMAR]) - statistics.median(took[None])) / batch
        report(f"masks: {masks_s * 1e6:.1f} µs for each constrained row")
        return masks_s

    def mixed_s(self) -> float:
        """Seconds for one step with several prompts and the decode steps that follow."""
        longest = min(self._measured.max_model_tokens, self._capacity // MIXED_BATCH) - MIXED_STEPS - 2
        engine = self._measured.engine(MIXED_BATCH * MIXED_PROMPT)
        for _ in range(MIXED_BATCH):
            self._add(engine, max(1, min(MIXED_PROMPT, longest)), output_tokens=MIXED_STEPS + 1)
        return sum(_timed(engine) for _ in range(MIXED_STEPS + 1))

    def _decode_grid(self) -> Iterator[tuple[int, int]]:
        """(batch, context) pairs that fit the KV pool and the model's context."""
        block = self._measured.layout.block_tokens
        for batch in self._grid.batches:
            for context in self._grid.contexts:
                needed = context + self._prompt_steps(batch, context) + DECODE_STEPS + 1 + block
                if batch * needed <= self._capacity and needed < self._measured.max_model_tokens:
                    yield batch, context

    def _begin(self, engine: Engine, batch: int, context: int, steps: int) -> int:
        """Computes the prompts of a batch, which then decodes for `steps` steps; the first may do so meanwhile. Returns
        the tokens in its KV."""
        answer = self._prompt_steps(batch, context) + steps + 1
        names = {self._add(engine, context, output_tokens=answer) for _ in range(batch)}
        tokens = 0
        while names:
            made = [token.request_id for token in _step(engine).tokens]
            names.difference_update(made)
            tokens += len(made)
        return batch * (context - 1) + tokens

    def _prompt_steps(self, batch: int, context: int) -> int:
        """At most so many compute a batch's prompts."""
        most = self._measured.most_step_tokens
        return 1 if most is None or batch * context <= most else math.ceil(batch * context / (most - batch)) + 1

    def _add(self, engine: Engine, prompt_tokens: int, output_tokens: int, grammar: str | None = None) -> str:
        """Returns its id."""
        number = next(self._numbers)
        vocab = self._measured.vocab_size
        prompt = tuple((number + 7 * position) % vocab for position in range(prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, grammar=grammar)
        engine.add(EngineRequest(str(number), prompt, sampling, HashKey("profile"), use_prefix_cache=False))
        return str(number)


def _timed(engine: Engine) -> float:
    """Seconds of one step. It ends with the logits on the host, so no device work is still running."""
    started_s = time.perf_counter()
    _step(engine)
    return time.perf_counter() - started_s


def _step(engine: Engine) -> StepResult:
    """Raises ConfigError if a request fails: nothing was measured."""
    result = engine.step()
    if (failed := next((end.error for end in result.ended if end.error is not None), None)) is not None:
        raise ConfigError(f"a request failed while it was measured: {failed.message}")
    return result
