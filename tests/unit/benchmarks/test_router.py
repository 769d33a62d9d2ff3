"""The router benchmark runs, whole and small, and its lines are what `make bench-router` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Figures = Callable[..., dict[str, dict[str, Any]]]
INDEX = {"index.bytes_per_block": "B", "index.events_per_s": "events/s", "index.lookup_256_us": "us"}
COST = {
    "router.cpu_ms_http": "ms",
    "router.cpu_ms_http_local": "ms",
    "router.cpu_ms_grpc": "ms",
    "router.rps_one_core": "requests/s",
    "router.p99_added_ms": "ms",
    "router.p99_token_ms": "ms",
}
DECIDE = {"router.decide_100k_ms": "ms", "router.hash_100k_ms": "ms"}
PEERS = {"index.peer": "look-ups/s", "index.peer_events_per_s": "events/s"}  # only where the peer is installed
REDIS = {f"router.redis_{what}_ttft_p99_ms": "ms" for what in ("killed", "frozen", "emptied", "lost")}
HOSTILE = {"router.idle_p99_ms": "ms", "router.slow_readers_p99_ms": "ms"}
OVERLOAD = {"router.overload_goodput": "requests/s", "router.refuse_p99_ms": "ms"}


@pytest.mark.slow
def test_every_figure_of_the_index_is_one_line(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "index")
    assert INDEX.keys() <= lines.keys() <= (INDEX | PEERS).keys()
    for name, line in lines.items():
        assert list(line) == ["figure", "value", "unit", "reference", "ratio"]
        assert line["unit"] == (INDEX | PEERS)[name]
        assert line["value"] > 0


@pytest.mark.slow
def test_what_a_request_costs_is_measured_on_a_real_router(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "cost")
    lines.pop("router.peer", None)  # only where the peer is installed
    assert {name: line["unit"] for name, line in lines.items()} == COST
    assert all(line["value"] > 0 for line in lines.values())


@pytest.mark.slow
def test_one_decision_is_measured(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "decide")
    assert {name: line["unit"] for name, line in lines.items()} == DECIDE
    assert all(line["value"] > 0 for line in lines.values())


@pytest.mark.soak_only  # as are the next three: the same site as above, and none looks at the product but by its speed
@pytest.mark.acceptance(18, soak="stand-ins, 4 s: more than half of the peak")
def test_most_of_the_peak_is_kept_under_overload(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "overload")
    assert {name: line["unit"] for name, line in lines.items()} == OVERLOAD
    assert lines["router.overload_goodput"]["ratio"] > 0.5


@pytest.mark.soak_only
def test_what_a_lost_redis_adds_to_the_first_token_is_measured(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "redis")
    assert {name: line["unit"] for name, line in lines.items()} == REDIS
    assert all(line["reference"] > 0 for line in lines.values())


@pytest.mark.soak_only
def test_what_hostile_clients_cost_the_others_is_measured(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "hostile")
    assert {name: line["unit"] for name, line in lines.items()} == HOSTILE
    assert all(line["ratio"] > 0 for line in lines.values())


@pytest.mark.soak_only
def test_what_costly_requests_cost_the_others_is_measured(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "costly")
    assert {name: line["unit"] for name, line in lines.items()} == {"router.costly_request_p99_ms": "ms"}
    assert all(line["ratio"] > 0 for line in lines.values())


@pytest.mark.soak_only
def test_what_observing_costs_is_one_share(figures: Figures) -> None:
    lines = figures("benchmarks.router", "--figure", "observability")
    assert {name: line["unit"] for name, line in lines.items()} == {"obs.overhead_share": "share"}
