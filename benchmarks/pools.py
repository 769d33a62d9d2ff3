"""Pools of the demo model on this machine: predictions compared with measurements, live changes, and the autoscaler
compared with static splits.

    make bench-pools ARGS="--folder FOLDER"
    python -m benchmarks.pools --figure role_change

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the target, `ratio`
value over target. docs/performance-method.md explains each figure. Figures that need the step times of this machine are
omitted without --folder FOLDER; if it lacks them, the run measures them. FOLDER also keeps the runs of predictions, and
a later run goes on from there. It belongs to one machine.
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
QUICK_PREDICTION = prediction.PredictionSizes(3.0, 2, 3.0, 4, 8, 40, Grid((16, 64), (1, 4), (32, 64)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pools", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=NAMES, help="only these (may be repeated)")
    parser.add_argument("--folder", type=Path, help="step times of this machine, and runs of predictions")
    parser.add_argument("--table", type=Path, help="prediction: file for the errors of each cell")
    parser.add_argument("--weights", action="append", choices=prediction.WEIGHTS, help="prediction: only these")
    parser.add_argument("--share", action="append", type=float, help="prediction: only these, as in 0.85")
    parser.add_argument("--shape", action="append", help="prediction: only these, as in 1:1")
    parser.add_argument("--trace", action="append", choices=prediction.TRACES, help="prediction: only these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks only that it runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    figures = _figures(options)
    for name in options.figure or NAMES:
        if name not in figures:
            say(f"{name}: omitted, because it needs --folder")
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
    if options.folder is not None:
        folder: Path = options.folder
        cells, shares = list(_cells(options)), options.share or prediction.SHARES
        found["prediction"] = lambda: prediction.prediction(folder, cells, shares, sizes, options.table)
        found["static_ratios"] = lambda: pool_changes.ratios(
            prediction.profiled(folder, "float32", sizes.grid), changes
        )
    return found


def _cells(options: argparse.Namespace) -> Iterator[prediction.CellName]:
    shapes = None if options.shape is None else [*map(_shape, options.shape)]
    for each in prediction.all_cells():
        is_asked = options.weights is None or each.weights in options.weights
        is_asked &= shapes is None or (each.prefill, each.decode) in shapes
        if is_asked and (options.trace is None or each.traffic in options.trace):
            yield each


def _shape(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    try:
        return int(prefill), int(decode)
    except ValueError:
        raise SystemExit(f"--shape: expected PREFILL:DECODE, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
