"""What load costs while every core is taken by other processes and nothing is broken.

    python -m benchmarks.contended --minutes 60

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `health.false_ejections`: workers
that routers ejected under mixed load. `overload.contended_admitted_failed`: requests that were not refused with 429 and
ended with an error, at more load than the cluster can serve. `overload.refuse_p99_ms`: how long those waited that were
refused with 429 on arrival. docs/performance-method.md explains them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, say, spec_of
from benchmarks.serving import percentile
from tandem.testing.models import write_tiny_llama

MIXED_S, OVERLOAD_S = 0.5, 0.005  # between two requests
EXPIRED = "waited "  # so begins the refusal of a request that was queued until its objective was missed
LAYERS = 24  # so that the workers, not the client, are what is overloaded
VOCAB, LONGEST_PROMPT, LONGEST_ANSWER = 300, 800, 80
OVERLOADED = {"router.classes": [{"name": "interactive", "ttft_slo_s": 4.0}], "router.queue_timeout_s": 60.0}


@contextmanager
def taken_cores() -> Iterator[None]:
    """One endless loop per core."""
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for each in others:
            with each:
                each.kill()


@dataclass(slots=True)
class Ends:
    """How requests ended, and how long each one took that was refused on arrival."""

    counts: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, rng: random.Random, ends: Ends) -> None:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randint(1, LONGEST_ANSWER), "temperature": 0}
    asked_s = time.monotonic()
    try:
        reply = await http.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        ends.counts[type(error).__name__] += 1
        return
    if reply.status_code == 429 and not reply.json()["error"]["message"].startswith(EXPIRED):
        ends.refused_ms.append(1000 * (time.monotonic() - asked_s))
    ends.counts["answered" if reply.is_success else f"{reply.status_code} {reply.json()['error']['code']}"] += 1


async def offer(address: str, every_s: float, for_s: float) -> tuple[Ends, int]:
    """How requests ended that came at this pace, and how many workers were ejected."""
    ends = Ends()
    rng, limits = random.Random(1), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=300.0, limits=limits) as http:
        until_s = time.monotonic() + for_s
        with taken_cores():
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < until_s:
                    group.create_task(ask(http, rng, ends))
                    await asyncio.sleep(rng.expovariate(1 / every_s))
        text = (await http.get("/metrics")).text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return ends, int(sum(each.value for each in samples if each.name == "tandem_ejections_total"))


async def measure(minutes: float, overload_minutes: float, folder: Path) -> None:
    model = {"models.0.source": str(write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, layers=LAYERS))}
    async with live(spec_of(1, 2, model)) as cluster:
        ends, ejections = await offer(cluster.routers[0][0], MIXED_S, minutes * 60)
    say(f"mixed load: {dict(ends.counts)}, {ejections} ejections")
    print(Figure("health.false_ejections", ejections, "ejections", None, None).line(), flush=True)
    async with live(spec_of(1, 2, model | OVERLOADED)) as cluster:
        ends, ejections = await offer(cluster.routers[0][0], OVERLOAD_S, overload_minutes * 60)
    say(f"overload: {dict(ends.counts)}, {ejections} ejections")
    if not any(end.startswith("429") for end in ends.counts):
        raise RuntimeError("no request was refused, so there was no overload: take a machine with more cores")
    failed = sum(count for end, count in ends.counts.items() if end != "answered" and not end.startswith("429"))
    print(Figure("overload.contended_admitted_failed", failed, "requests", None, None).line(), flush=True)
    if ends.refused_ms:
        p99_ms = round(percentile(ends.refused_ms, 0.99), 1)
        print(Figure("overload.refuse_p99_ms", p99_ms, "ms", None, None).line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contended", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of mixed load")
    parser.add_argument("--overload-minutes", type=float, default=10.0)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        asyncio.run(measure(options.minutes, options.overload_minutes, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
