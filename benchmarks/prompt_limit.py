"""Prompts beside answers under engine.longest_step_s, against the best fixed number of tokens per step.

    python -m benchmarks.prompt_limit            # the demo model on the CPU, some minutes
    python -m benchmarks.prompt_limit --quick    # tiny: checks that it runs

Four requests answer while prompts come one after another. The longest step is `SLACK` times a step without prompts. The
best fixed number is found by trying all of them, as an operator would have to for each model, device and load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.handoff_figures import Figure
from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tandem.request import SamplingParams
from tandem.testing.engine import make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama

ANSWERS = 4
SLACK = 3.0
FIXED = (16, 24, 32, 48, 64, 96, 128)
KEPT = 0.95  # of the steps


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt: int = 1000
    vocab: int = 49152
    steps: int = 120  # with prompts and answers
    settling: int = 15  # before them
    fixed: tuple[int, ...] = FIXED


QUICK = Sizes(prompt=60, vocab=300, steps=6, settling=1, fixed=(32, 64))


@dataclass(frozen=True, slots=True)
class Run:
    """Times of steps with prompts and answers, and the prompt tokens that they computed."""

    seconds: list[float]
    tokens: list[int]

    @property
    def kept_s(self) -> float:
        """What KEPT of the steps took at most."""
        return float(np.quantile(self.seconds, KEPT))

    @property
    def prompt_tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def measure(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    alone_s = float(np.median(_run(model_dir, sizes, prompts=False).seconds))
    longest_s = SLACK * alone_s
    ours = _run(model_dir, sizes, longest_step_s=longest_s)
    fixed = {tokens: _run(model_dir, sizes, max_step_tokens=tokens + ANSWERS) for tokens in sizes.fixed}
    for tokens, run in fixed.items():
        kept = f"{1e3 * run.kept_s:.1f} ms for {KEPT:.0%} of the steps"
        print(f"{tokens} prompt tokens a step: {run.prompt_tokens_per_s:.0f} a second, {kept}", file=sys.stderr)
    yield Figure("engine.limit_step_ms", 1e3 * ours.kept_s, "ms", 1e3 * longest_s, ours.kept_s / longest_s)
    late = sum(each > 1.1 * longest_s for each in ours.seconds) / len(ours.seconds)
    yield Figure("engine.limit_late_share", late, "of steps, by a tenth")
    as_late = max(1.1 * longest_s, ours.kept_s)
    in_time = [run.prompt_tokens_per_s for run in fixed.values() if run.kept_s <= as_late]
    best = max(in_time, default=None)
    rate = ours.prompt_tokens_per_s
    yield Figure("engine.limit_prompt_rate", rate, "tok/s", best, rate / best if best else None)


def _run(model_dir: Path, sizes: Sizes, *, prompts: bool = True, **options: float) -> Run:
    settings: dict[str, Any] = {"max_step_tokens": 512, "threads_per_rank": 2, "kv_blocks": 600, **options}
    with tempfile.TemporaryDirectory() as folder:
        rank = single_rank(model_dir, Path(folder) / "group", **settings)
        engine, names, found = rank.engine, count(), Run([], [])
        for number in range(ANSWERS):
            answering = SamplingParams(temperature=0.0, max_tokens=8 * sizes.steps + 200)
            engine.add(make_request(f"answer-{number}", random_prompt(16, sizes.vocab, number), answering))
        while engine.load().waiting_tokens:
            engine.step()
        while len(found.seconds) < sizes.settling + sizes.steps:
            if prompts and not engine.load().waiting_tokens:
                number = next(names)
                prompt = random_prompt(sizes.prompt, sizes.vocab, 1000 + number)
                engine.add(make_request(f"prompt-{number}", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
            began_s = time.perf_counter()
            work = engine.step().work
            if work.decode_tokens and bool(work.prefill_tokens) is prompts:
                found.seconds.append(time.perf_counter() - began_s)
                found.tokens.append(work.prefill_tokens)
        return Run(found.seconds[sizes.settling :], found.tokens[sizes.settling :])


def main() -> int:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_limit", description=summary)
    parser.add_argument("--quick", action="store_true", help="a tiny model: checks only that it runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_llama(Path(scratch), vocab=QUICK.vocab) if options.quick else pull(DEMO_MODEL)
        for figure in measure(folder, QUICK if options.quick else Sizes()):
            print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
