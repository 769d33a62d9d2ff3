"""The handoff benchmark runs, whole and small, and its lines are what `make bench-handoff` promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.handoff_bulk import Bulk
from kvtransfer.control import Received
from kvtransfer.stages import ReceiveStages
from kvtransfer.testing.worker import FakeModel, FakeWorker
from tandem.config.transfer import TransportKind

DIFFERENCES = {"handoff.ttft_extra_ms", "handoff.gpu_digest_share"}
Figures = Callable[..., dict[str, dict[str, Any]]]
ON_DEVICES = {
    *(f"handoff.gpu_mapped{suffix}" for suffix in ("", "_4k", "_128k", "_digest")),
    "handoff.gpu_peer_mapped",
    "handoff.gpu_nccl",
}
SPEEDS = {"handoff.mapped", "handoff.mapped_digest", "handoff.gloo", *ON_DEVICES}
TIMES = {"handoff.small_p50_ms", "handoff.small_p99_ms", "handoff.ttft_extra_ms"}
PEERS = {"handoff.agent_200_peers_rss_mb", "handoff.agent_200_peers_threads"}
OTHERS = {
    "handoff.exposed_share",
    "handoff.gpu_exposed_share",
    "handoff.agent_rss_mb",
    "handoff.gpu_digest_share",
    *PEERS,
}


def test_the_breakdown_leaves_out_handoffs_that_do_not_say_when_pieces_moved() -> None:
    worker = cast("FakeWorker", SimpleNamespace(model=FakeModel(), num_blocks=64))
    bulk = Bulk(worker, worker, tokens=32)
    bulk.received.append((1.0, 2.0, Received("a", 0, 0, 0, 0.0)))
    assert bulk.breakdown() == {}
    stages = ReceiveStages(1.0, first_piece_at_s=1.25, last_piece_at_s=1.5, verified_at_s=1.75)
    bulk.received.append((1.0, 2.0, Received("b", 0, 0, 3, 0.0, stages=stages)))
    assert bulk.breakdown() == {
        "pieces": 3, "before_ms": 250.0, "moving_ms": 250.0, "closing_ms": 250.0, "report_ms": 250.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_figure_can_be_asked_for_by_name(figures: Figures) -> None:
    assert figures("benchmarks.handoff", "--figure", "mapped").keys() == {"handoff.mapped"}


@pytest.mark.slow
def test_the_exposed_share_of_devices_is_measured_between_whole_workers(figures: Figures, tmp_path: Path) -> None:
    options = ("--figure", "gpu_exposed_share", "--model", str(tmp_path / "model"))
    line = figures("benchmarks.handoff", *options)["handoff.gpu_exposed_share"]
    assert line["value"] > 0
    assert line["reference"] > 0
    assert (tmp_path / "model" / "config.json").exists()  # the next figure finds it there


@pytest.mark.slow
def test_an_agent_with_many_peers_stays_within_its_memory_and_threads(figures: Figures) -> None:
    """With fewer peers than the figures say: more than links stay open, of which memory and threads would show."""
    lines = figures("benchmarks.handoff", "--figure", "agent_200_peers")
    assert lines.keys() == PEERS
    assert 5 < lines["handoff.agent_200_peers_rss_mb"]["value"] <= 160
    assert 1 < lines["handoff.agent_200_peers_threads"]["value"] <= 24


@pytest.mark.soak_only  # as long as thirty other tests
def test_every_figure_is_one_line_and_speeds_stand_beside_their_limit(figures: Figures) -> None:
    lines = figures("benchmarks.handoff")
    speeds = SPEEDS | {"handoff.tcp"} if "tcp" in {kind.value for kind in TransportKind} else SPEEDS
    assert lines.keys() == speeds | TIMES | OTHERS
    for name, line in lines.items():
        assert list(line) == ["figure", "value", "unit", "reference", "ratio"]
        assert name in DIFFERENCES or line["value"] > 0
    for name in speeds:
        assert lines[name]["unit"] == "GB/s"
        assert lines[name]["reference"] > 0
        assert lines[name]["ratio"] > 0
    assert all(lines[name]["unit"] == "ms" for name in TIMES)
    assert 5 < lines["handoff.agent_rss_mb"]["value"] < 500
