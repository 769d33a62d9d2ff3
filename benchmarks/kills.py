"""What the death of each kind of process costs: each is killed several times under load.

    python -m benchmarks.kills --backend subprocess --times 10

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. For each kind: requests that their
clients had to send again (after a second, to the other router), requests that failed nevertheless, wrong answers, the
longest pause without a token, and the time until all was ready again (the worst of all times). The model is tiny, so a
worker starts in the time that its processes need. docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, say, spec_of
from cluster.cli.admin_client import Admin
from cluster.testing.chaos import Chaos, Entry
from tandem.testing.models import random_prompt, write_tiny_llama

KINDS = {
    "controller": "kill the controller",
    "router": "kill a router",
    "service": "kill a service",
    "rank": "kill a rank",
    "agent": "kill an agent",
    "redis": "kill Redis",
}
RAY_KINDS = {"raylet": "kill the raylet", "gcs": "kill the GCS"}
VOCAB, PROMPTS, STREAMS = 300, 8, 4
BETWEEN_S = 12.0  # a controller that ran for longer than 10 s is followed by the next without a delay


async def kills(backend: str, kinds: dict[str, str], times: int, folder: Path) -> None:
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1)
    changes = {
        "control.backend": backend,
        "models.0.source": str(model),
        "router.replicas": 2,
        "router.disaggregation": "always",
    }
    prompts = [random_prompt(40 + 30 * number, VOCAB, number) for number in range(PROMPTS)]
    async with live(spec_of(2, 2, changes)) as cluster:
        routers = [http for http, _ in cluster.routers]
        chaos = Chaos(Admin(cluster.admin_address), routers, os.getpid(), "tiny", prompts, seed=1)
        await chaos.begin(STREAMS)
        for name, kind in kinds.items():
            entries, healed_s = list[Entry](), 0.0
            for _ in range(times):
                await asyncio.sleep(BETWEEN_S)
                first = len(chaos.history.entries) - STREAMS
                if not await chaos.injure(kind):
                    raise RuntimeError(f"there is nothing to injure: {kind}")
                began_s = time.monotonic()
                await asyncio.sleep(0.3)  # until the death is seen
                await chaos.healed(at_rest=False)
                healed_s = max(healed_s, time.monotonic() - began_s)
                await asyncio.sleep(2.0)
                entries += chaos.history.entries[first:]
            failed = sum(bool(each.ends) and each.ends != ["right"] for each in entries)
            wrong = sum(each.is_wrong for each in entries)
            pause_s = max(each.pause_s for each in entries)
            for figure, value, unit in (
                ("sent_again", sum(len(each.tries) > 1 for each in entries), "requests"),
                ("failed", failed, "requests"),
                ("wrong", wrong, "requests"),
                ("pause_s", round(pause_s, 2), "s"),
                ("healed_s", round(healed_s, 2), "s"),
            ):
                print(Figure(f"kills.{backend}.{name}.{figure}", value, unit, None, None).line(), flush=True)
        await chaos.end()
        say(f"{len(chaos.history.entries)} requests, {chaos.history.wrong} wrong; {chaos.history.failures()[:5]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("ray", "subprocess"), default="ray")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", help="one kind of process")
    options = parser.parse_args()
    kinds = KINDS | (RAY_KINDS if options.backend == "ray" else {})
    if options.only:
        kinds = {options.only: kinds[options.only]}
    with TemporaryDirectory() as folder:
        asyncio.run(kills(options.backend, kinds, options.times, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
