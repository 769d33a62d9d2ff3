"""How fast KV moves from a prefill worker to a decode worker, beside what the machine could do.

    make bench-handoff
    python -m benchmarks.handoff --figure mapped --figure mapped_digest

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. Where there is a physical limit,
`reference` is that limit, measured in the same run and in turns with ours, and `ratio` is ours over it. Medians, after
a warm-up, on pools whose pages are there; one thread for each process's tensor work. docs/performance.md explains each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

from benchmarks import handoff_bulk, handoff_device, handoff_workers
from benchmarks.handoff_figures import QUICK, Figure, Sizes

FIGURES: dict[str, Callable[[Sizes], Awaitable[list[Figure]]]] = {
    "mapped": handoff_bulk.mapped,
    "mapped_digest": handoff_bulk.mapped_digest,
    "gloo": handoff_bulk.gloo,
    "tcp": handoff_bulk.tcp,
    "gpu_mapped": handoff_device.gpu_mapped,
    "small": handoff_workers.small,
    "exposed_share": handoff_workers.exposed_share,
    "ttft_extra": handoff_workers.ttft_extra,
    "agent_rss": handoff_bulk.agent_rss,
}


async def run(names: list[str], sizes: Sizes) -> None:
    for name in names:
        for figure in await FIGURES[name](sizes):
            print(figure.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    asyncio.run(run(options.figure or list(FIGURES), QUICK if options.quick else Sizes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
