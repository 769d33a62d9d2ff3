"""Measures the steps of one engine on this hardware, without the rest of a worker."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

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
FIXED_BATCH, FIXED_PROMPT, FIXED_STEPS = 4, 64, 8  # about as much time for prompts as for decoding

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


Measured = TypeVar("Measured", PrefillPoint, DecodePoint, MixedPoint)


class FixedWork(NamedTuple):
    """Seconds of the same step with prompts and of the same decode steps, whenever they are measured."""

    prompts_s: float
    decoding_s: float


class _Steadied(Generic[Measured]):
    """Measurements without the changes of the machine's speed: that of a shared one differs by a sixth within minutes.
    Each is held against a fixed piece of work before and after it."""

    def __init__(self, fixed_s: Callable[[], float]) -> None:
        self._fixed_s = fixed_s
        self._taken = [self._less_of_two_s()]
        self._points: list[tuple[Measured, float]] = []

    def add(self, points: Iterable[Measured]) -> None:
        """Of measurements since the last call."""
        self._taken.append(self._less_of_two_s())
        beside_s = (self._taken[-2] + self._taken[-1]) / 2
        self._points += [(point, beside_s) for point in points]

    @property
    def usual_s(self) -> float:
        return statistics.median(self._taken)

    def points(self, usual_s: float | None = None) -> list[Measured]:
        """As on a machine on which the fixed work takes `usual_s`; None: its median here."""
        usual_s = usual_s or self.usual_s
        return [point._replace(seconds=point.seconds * usual_s / beside_s) for point, beside_s in self._points]

    def _less_of_two_s(self) -> float:
        """One may have been interrupted."""
        return min(self._fixed_s(), self._fixed_s())


class Profiler:
    """Medians of the step times of one engine, in seconds."""

    def __init__(self, measured: MeasuredEngine, spec: EngineSpec, grid: Grid) -> None:
        self._measured, self._spec, self._grid = measured, spec, grid
        self._numbers = count()
        self._capacity = measured.layout.num_blocks * measured.layout.block_tokens
        self._usual_s: dict[str, float] = {}

    def prefills(self, report: Callable[[str], None]) -> list[PrefillPoint]:
        longest = min(self._measured.max_model_tokens - 2, self._capacity - 2)
        found = _Steadied[PrefillPoint](self.prompts_s)
        for chunk in self._grid.chunks:
            chunks = min(CHUNKS_OF_A_PROMPT, longest // chunk)
            seconds: dict[int, list[float]] = defaultdict(list)
            for _ in range(REPEATS if chunks else 0):
                engine = self._measured.engine(chunk)
                self._add(engine, chunk * chunks, output_tokens=1)
                for number in range(chunks):
                    seconds[number * chunk].append(_timed(engine))
            found.add(PrefillPoint(chunk, context, statistics.median(took)) for context, took in seconds.items())
            report(f"prefill, chunks of {chunk}: {chunks} contexts")
        self._usual_s["prompts_s"] = found.usual_s
        return found.points()

    def decodes(self, report: Callable[[str], None]) -> list[DecodePoint]:
        grid = [*self._decode_grid()]
        if not grid:
            raise ConfigError(
                f"engine.kv_memory_bytes: {self._capacity} tokens of KV are too few to profile: raise it",
                field="engine.kv_memory_bytes",
            )
        found = _Steadied[DecodePoint](self.decoding_s)
        for batch, context in grid:
            engine = self._measured.engine(batch * context)
            begun = self._begin(engine, batch, context, DECODE_STEPS)
            took = statistics.median(_timed(engine) for _ in range(DECODE_STEPS))
            found.add([DecodePoint(batch, begun + batch * (DECODE_STEPS // 2), took)])
            report(f"decode, {batch} requests of {context} tokens: {1000 * took:.2f} ms")
        self._usual_s["decoding_s"] = found.usual_s
        return found.points()

    def mixed(self, report: Callable[[str], None]) -> list[MixedPoint]:
        """Steps in which a prompt is computed beside answers."""
        found = _Steadied[MixedPoint](lambda: sum(self.fixed_work()))
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
                found.add([MixedPoint(chunk, batch, begun + batch * REPEATS, statistics.median(took))])
        points = found.points(sum(self._usual_s.values()) if len(self._usual_s) == len(FixedWork._fields) else None)
        report(f"prompts beside answers: {len(points)} steps")
        return points

    def mask_s_per_row(self, report: Callable[[str], None]) -> float | None:
        """Seconds that a row with a grammar adds to a decode step; None if the model's vocabulary takes no grammar."""
        engine = self._measured.constrained
        batch = max(1, min(MASKED_BATCH, self._spec.max_running_requests, self._capacity // (2 * FIXED_PROMPT)))
        took: dict[str | None, list[float]] = {None: [], MASK_GRAMMAR: []}
        for grammar in (None, MASK_GRAMMAR) * MASK_RUNS:
            for _ in range(batch):
                self._add(engine, FIXED_PROMPT // 2, output_tokens=3 * MASKED_STEPS, grammar=grammar)
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

    @property
    def usual_work(self) -> FixedWork:
        """The fixed work's median while prompts and decoding were measured."""
        return FixedWork(**self._usual_s)

    def fixed_work(self, runs: int = 1) -> FixedWork:
        """Medians."""
        taken = [(self.prompts_s(), self.decoding_s()) for _ in range(runs)]
        return FixedWork(*(statistics.median(each) for each in zip(*taken, strict=True)))

    def prompts_s(self) -> float:
        """Seconds for one step with several prompts."""
        engine = self._fixed_batch(output_tokens=1)
        return _timed(engine)

    def decoding_s(self, steps: int = FIXED_STEPS, prompt_tokens: int = FIXED_PROMPT) -> float:
        """Seconds for so many steps of several requests that decode; fewer if a context has less room."""
        steps = min(steps, self._fixed_room // 2)
        engine = self._fixed_batch(output_tokens=steps + 1, prompt_tokens=prompt_tokens)
        _step(engine)
        return sum(_timed(engine) for _ in range(steps))

    @property
    def _fixed_room(self) -> int:
        """Tokens that each request of the fixed work may have."""
        return max(2, min(self._measured.max_model_tokens, self._capacity // FIXED_BATCH) - 2)

    def _fixed_batch(self, output_tokens: int, prompt_tokens: int = FIXED_PROMPT) -> Engine:
        engine = self._measured.engine(FIXED_BATCH * FIXED_PROMPT)
        for _ in range(FIXED_BATCH):
            self._add(engine, max(1, min(prompt_tokens, self._fixed_room - output_tokens)), output_tokens)
        return engine

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
