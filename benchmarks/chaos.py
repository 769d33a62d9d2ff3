"""Random faults in a cluster of this machine: how many requests are answered, and whether rightly.

    python -m benchmarks.chaos --minutes 60

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the target, `ratio`
value over target (null for a target of 0). docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, say, spec_of
from cluster.cli.admin_client import Admin
from cluster.testing.chaos import Chaos, History
from tandem.config.model import DEMO_MODEL
from tandem.testing.models import random_prompt

SUCCESS_TARGET = 0.999
STREAMS = 4
PROMPTS, FIRST_VOCAB_ID, VOCAB = 16, 256, 4000


async def hour(minutes: float, every_s: float, seed: int) -> History:
    changes = {"router.replicas": 2, "router.disaggregation": "always"}
    prompts = [
        [FIRST_VOCAB_ID + token for token in random_prompt(40 + 20 * number, VOCAB, number)]
        for number in range(PROMPTS)
    ]
    async with live(spec_of(2, 2, changes)) as cluster:
        routers = [http for http, _ in cluster.routers]
        chaos = Chaos(Admin(cluster.admin_address), routers, os.getpid(), DEMO_MODEL, prompts, seed)
        return await chaos.run(60 * minutes, every_s, STREAMS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    history = asyncio.run(hour(options.minutes, options.every_s, options.seed))
    say(f"{len(history.entries)} requests, {history.retried} tried again by their clients")
    for fault, times in sorted(history.faults.items()):
        say(f"  {times:3} {fault}")
    for failure in history.failures():
        say(f"  failed: {failure}")
    success = round(history.success, 6)
    print(Figure("chaos.hour_success", success, "ratio", SUCCESS_TARGET, round(success / SUCCESS_TARGET, 4)).line())
    print(Figure("chaos.hour_wrong_tokens", history.wrong, "requests", 0.0, None).line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
