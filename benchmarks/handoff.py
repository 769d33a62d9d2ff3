"""The speed of the handoff from a prefill to a decode worker, compared with the machine's limits.

    make bench-handoff
    python -m benchmarks.handoff --figure mapped --figure mapped_digest

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. If there is a physical limit,
`reference` is that limit, measured in the same run, alternating with Tandem, and `ratio` is value over limit. Values
are medians after a warm-up, on pools whose pages are resident, with one thread for tensor work per process.
docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import handoff_bulk, handoff_device, handoff_peers, handoff_workers
from benchmarks.handoff_figures import QUICK, Figure, HandoffSizes

FIGURES: dict[str, Callable[[HandoffSizes], Awaitable[list[Figure]]]] = {
    "mapped": handoff_bulk.mapped,
    "mapped_digest": handoff_bulk.mapped_digest,
    "gloo": handoff_bulk.gloo,
    "tcp": handoff_bulk.tcp,
    "gpu_mapped": handoff_device.gpu_mapped,
    "gpu_exposed_share": handoff_device.gpu_exposed_share,
    "gpu_peers": handoff_device.gpu_peers,
    "small": handoff_workers.small,
    "exposed_share": handoff_workers.exposed_share,
    "ttft_extra": handoff_workers.ttft_extra,
    "agent_rss": handoff_bulk.agent_rss,
    "agent_200_peers": handoff_peers.agent_200_peers,
}


async def run(names: list[str], sizes: HandoffSizes) -> None:
    for name in names:
        for figure in await FIGURES[name](sizes):
            print(figure.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks only that it runs")
    parser.add_argument("--model", type=Path, help="folder of the GPU figures' model, written if it is not there")
    options = parser.parse_args()
    sizes = replace(QUICK if options.quick else HandoffSizes(), model=options.model)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    asyncio.run(run(options.figure or list(FIGURES), sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
