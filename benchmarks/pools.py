"""Pools of the demo model on this machine: predictions compared with measurements, live changes, and the autoscaler
compared with static splits.

    make bench-pools ARGS="--cost cost.json --results cells.jsonl"
    python -m benchmarks.pools --figure role_change

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the target, `ratio`
value over target. docs/performance-method.md explains each figure. Figures that need the step times of this machine are
omitted without --cost FILE; if FILE does not exist, the run measures the step times and writes it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import pool_changes, prediction
from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import say
from cluster.profiling.profiler import Grid
from tandem.errors import TandemError

QUICK_CHANGES = pool_changes.PoolChangeSizes(2, 4, 16, 24, 3.0, 40)
QUICK_PREDICTION = prediction.PredictionSizes(3.0, 3.0, 4, 8, 40, Grid((16, 64), (1, 4), (32, 64)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pools", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=NAMES, help="only these (may be repeated)")
    parser.add_argument("--cost", type=Path, help="step times of this machine, as written by `tandem profile`")
    parser.add_argument(
        "--results", type=Path, help="prediction: file for measurements, from which a later run resumes"
    )
    parser.add_argument("--shape", action="append", help="prediction: only these, as in 1:1")
    parser.add_argument("--trace", action="append", choices=prediction.TRACES, help="prediction: only these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks only that it runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    figures = _figures(options)
    for name in options.figure or NAMES:
        if name not in figures:
            say(f"{name}: omitted, because it needs --cost")
            continue
        try:
            for figure in figures[name]():
                print(figure.line(), flush=True)
        except TandemError as error:
            say(f"{name}: {error.message}")
            return 2
    return 0


NAMES = ("role_change", "moved_gap", "prediction", "static_ratios")


def _figures(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Figure]]]:
    changes = QUICK_CHANGES if options.quick else pool_changes.PoolChangeSizes()
    sizes = QUICK_PREDICTION if options.quick else prediction.PredictionSizes()
    found: dict[str, Callable[[], Iterator[Figure]]] = {
        "role_change": lambda: pool_changes.role_change(changes),
        "moved_gap": lambda: pool_changes.moved_gap(changes),
    }
    if options.cost is not None:
        cost: Path = options.cost
        shapes = tuple(map(_shape, options.shape)) if options.shape else prediction.SHAPES
        names = options.trace or prediction.TRACES
        found["prediction"] = lambda: prediction.prediction(cost, shapes, names, sizes, options.results)
        found["static_ratios"] = lambda: pool_changes.ratios(prediction.profiled(cost, sizes.grid), changes)
    return found


def _shape(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    try:
        return int(prefill), int(decode)
    except ValueError:
        raise SystemExit(f"--shape: expected PREFILL:DECODE, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
