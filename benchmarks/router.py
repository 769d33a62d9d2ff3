"""The cost of the router, and its share of prefix cache hits.

    make bench-router
    python -m benchmarks.router --figure index
    python -m benchmarks.router --trace mooncake_conversation.jsonl

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the same work done by
a peer in the same run, if one is installed. Medians, one thread. docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import (
    observability,
    router_cost,
    router_costly,
    router_decide,
    router_hostile,
    router_index,
    router_overload,
    router_redis,
    router_share,
)
from benchmarks.handoff_figures import Figure

FIGURES: dict[str, Callable[[bool], Iterator[Figure]]] = {  # called with: whether to be quick
    "cost": lambda quick: router_cost.figures(router_cost.QUICK if quick else router_cost.CostSizes()),
    "costly": lambda quick: router_costly.figures(router_costly.QUICK if quick else router_costly.CostlySizes()),
    "decide": lambda quick: router_decide.figures(router_decide.QUICK if quick else router_decide.DecideSizes()),
    "hostile": lambda quick: router_hostile.figures(router_hostile.QUICK if quick else router_hostile.HostileSizes()),
    "index": lambda quick: router_index.figures(router_index.QUICK if quick else router_index.IndexSizes()),
    "observability": lambda quick: observability.figures(observability.QUICK if quick else observability.SIZES),
    "overload": lambda quick: router_overload.figures(
        router_overload.QUICK if quick else router_overload.OverloadSizes()
    ),
    "redis": lambda quick: router_redis.figures(router_redis.QUICK if quick else router_redis.RedisSizes()),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only these (may be repeated)")
    parser.add_argument(
        "--trace", type=Path, help="trace in Mooncake's format: measures the share of cache hits, and only that"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks only that it runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.trace is not None:
        sizes = router_share.QUICK if options.quick else router_share.ShareSizes()
        figures = router_share.figures(sizes, options.trace)
    else:
        figures = (figure for name in options.figure or FIGURES for figure in FIGURES[name](options.quick))
    for figure in figures:
        print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
