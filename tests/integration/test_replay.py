"""What a real router did before real workers, recorded, is what its core does when the recording is replayed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app as command_line
from router.requests.raw_request import RawRequest, RawSampling
from router.requests.recording.replay import Replay, ReplayReport
from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import TandemError
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2

VOCAB = 300
ENGINE = EngineSpec(kv_blocks=40, max_step_tokens=100)  # some reservations find no room


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, heads=4, kv_heads=2, seed=1)


def replayed(file: Path) -> ReplayReport:
    with file.open("rb") as source:
        return Replay().run(source)


def recordings(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def seen(file: Path) -> Counter[str]:
    """Events and actions, and what they say where it matters."""
    found: Counter[str] = Counter()
    for line in map(json.loads, file.read_text().splitlines()):
        if line["type"] == "event":
            event = line["event"]
            found[event["type"]] += 1
            if event["type"] == "Started":
                found["handoff" if event["prefill"] else "local"] += 1
            found.update(action["type"] for action in line["actions"])
    return found


async def test_a_recorded_run_of_a_real_cluster_replays_the_same(
    routed: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    spec = RouterSpec(http_port=0, grpc_port=0, record=str(tmp_path), disaggregation=Disaggregation.AUTO)
    async with routed(tiny, prefill=1, decode=2, engine=ENGINE, router=spec) as live:
        service, fleet = live.app.service, live.app.dispatcher.fleet
        workers = {worker.key.worker_id: worker for worker in fleet.workers()}

        async def ask(tokens: int, number: int, answer: int = 40) -> int:
            sampling = RawSampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
            prompt = tuple(random_prompt(tokens, VOCAB, number))
            submitted = await service.submit(RawRequest("tiny", prompt, sampling))
            count = 0
            try:
                async for pieces in submitted.stream:
                    count += sum(len(piece.tokens) for piece in pieces)
                    if answer == 41:  # a client that leaves
                        submitted.stream.cancel()
            except TandemError:
                pass
            return count

        def running(worker_id: str) -> int:
            return sum(
                run.answer_tokens > 0 for run in live.app.dispatcher.running() if run.decode.worker_id == worker_id
            )

        # Handoffs and local prefills, more at a time than the KV blocks hold; some clients leave.
        sizes = (20, 120, 200, 90)
        await asyncio.gather(*(ask(sizes[n % 4], n, 41 if n % 5 == 4 else 40) for n in range(24)))

        # Moves off a worker that is to be emptied, and gets nothing new.
        asking = [asyncio.create_task(ask(60, 100 + n, 200)) for n in range(4)]
        decodes = ["decode-0", "decode-1"]
        await until(lambda: any(map(running, decodes)), timeout_s=30)
        leaving, other = sorted(decodes, key=running, reverse=True)  # all four may be on one
        info = cluster_pb2.WorkerInfo()
        info.CopyFrom(live.workers.directory.workers[leaving])
        info.drain = cluster_pb2.DRAIN_MOVE
        await live.workers.directory.put(info)
        await until(lambda: not workers[leaving].account.requests, timeout_s=30)
        await asyncio.gather(*asking)

        # The other is lost with requests, for it is frozen before they come.
        live.workers.live[other].ranks[0].send_signal(signal.SIGSTOP)
        asking = [asyncio.create_task(ask(60, 200 + n, 200)) for n in range(4)]
        await until(lambda: workers[other].account.requests > 0, timeout_s=30)
        live.workers.live[other].kill()
        info.drain = cluster_pb2.DRAIN_NONE
        await live.workers.directory.put(info)
        await asyncio.gather(*asking)

    (file,) = recordings(tmp_path)
    kinds = seen(file)
    for wanted in ("handoff", "local", "WorkerGone", "MoveStarted", "Moved", "Cancelled", "Requeue", "Join", "End"):
        assert kinds[wanted], f"the run had no {wanted}: {kinds}"
    report = replayed(file)
    assert report.first is None
    assert not report.skipped
    assert report.runs == 32
    assert report.events > 4 * 32  # how many tokens come in one depends on how fast the machine is
    assert report.placements > 24

    done = CliRunner().invoke(command_line, ["replay", str(file), "--steps"])
    assert done.exit_code == 0, done.output
    assert "all the same" in done.output
