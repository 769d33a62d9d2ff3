"""What the dashboard keeps and works out, without a router: slices, percentiles, flows, events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.dashboard import cluster_status, figures, snapshot
from router.dashboard.events import MAX_EVENTS, EventKind, EventLog, FleetWatch, Severity
from router.dashboard.flows import MAX_PAIRS, TIME_CONSTANT_S, Flows
from router.dashboard.time_slices import (
    BUCKETS,
    LEAST_S,
    SLICE_S,
    SLICES,
    Count,
    Latency,
    TimeSlices,
    bucket_of,
    quantile,
)
from router.policies.pace_estimates import Estimates
from router.prefix_index.mirror import WorkerKey
from router.workers.fleet import Fleet
from router.workers.health import EjectReason, HealthState
from tandem.config.model import Role
from tandem.testing.models import FakeClock
from tandem.v1 import cluster_pb2, worker_pb2


class TestSlices:
    @pytest.mark.parametrize("spread", [0.5, 2.0])
    def test_percentiles_are_off_by_a_bucket_at_most(self, spread: float) -> None:
        drawn = random.Random(1)
        seconds = sorted(0.02 * drawn.lognormvariate(0, spread) for _ in range(4000))
        slices = TimeSlices()
        for each in seconds:
            slices.observe(Latency.TTFT, each, 5.0)
        [only] = slices.recent(60.0, 5.0)
        for share in (0.1, 0.5, 0.9, 0.99):
            found = quantile(only.buckets[Latency.TTFT], share, only.longest_s[Latency.TTFT])
            assert found == pytest.approx(seconds[int(share * len(seconds))], rel=0.07)

    @pytest.mark.parametrize("seconds", [[3.14], [0.9, 1.0, 3.14], [1e-5], [2e3, 5e3]])
    def test_no_percentile_is_above_everything_observed(self, seconds: list[float]) -> None:
        slices = TimeSlices()
        for each in seconds:
            slices.observe(Latency.TTFT, each, 5.0)
        assert figures.summaries(slices, 6.0)[0].ttft.p99 == pytest.approx(seconds[-1], rel=1e-9)
        assert figures.history(slices, 6.0, 0.0).ttft.p99[-1] == pytest.approx(seconds[-1], rel=1e-9)

    @pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-9, LEAST_S, 1.0, 1e3, 1e9])
    def test_every_latency_has_a_bucket_and_longer_ones_no_lower_one(self, seconds: float) -> None:
        assert 0 <= bucket_of(seconds) <= bucket_of(seconds * 2 if seconds > 0 else 1.0) < BUCKETS

    def test_without_observations_there_is_no_percentile(self) -> None:
        assert quantile([], 0.5, 0.0) is None
        assert quantile([0] * BUCKETS, 0.5, 0.0) is None

    def test_what_is_older_than_the_window_is_forgotten_and_memory_is_bounded(self) -> None:
        slices = TimeSlices()
        for number in range(3 * SLICES):
            slices.add(Count.FINISHED, 1, number * SLICE_S)
        now_s = (3 * SLICES - 1) * SLICE_S
        history = slices.history(now_s)
        assert [each is not None for each in history] == [True] * SLICES
        assert sum(each.counts[Count.FINISHED] for each in slices.recent(60.0, now_s)) == 6
        later = slices.history(now_s + 2 * SLICE_S)
        assert later[-1] is None
        assert later[-3] is not None
        assert slices.history(now_s + 10 * SLICES * SLICE_S) == [None] * SLICES
        assert slices.recent(600.0, now_s + 10 * SLICES * SLICE_S) == []


class TestFigures:
    @pytest.mark.parametrize(("up_s", "now_s"), [(3.0, 1003.0), (25.0, 1009.9), (500.0, 1000.0), (500.0, 1005.0)])
    def test_a_steady_rate_is_told_as_it_is(self, up_s: float, now_s: float) -> None:
        slices = TimeSlices()
        at_s = max(now_s - up_s, now_s - 100.0)
        while at_s < now_s:
            slices.add(Count.OUTPUT_TOKENS, 10, at_s)
            at_s += 0.1
        rates = figures.rates(slices, up_s, now_s)
        assert rates.output_tokens_per_s == pytest.approx(100, rel=0.07)

    def test_a_closed_slice_keeps_its_percentiles_and_an_open_one_follows(self) -> None:
        slices = TimeSlices()
        slices.observe(Latency.TTFT, 0.1, 5.0)
        assert figures.history(slices, 5.0, 0.0).ttft.p50[-1] == pytest.approx(0.1, rel=0.15)
        for _ in range(9):
            slices.observe(Latency.TTFT, 1.0, 6.0)
        assert figures.history(slices, 6.0, 0.0).ttft.p50[-1] == pytest.approx(1.0, rel=0.15)
        for now_s in (15.0, 16.0):
            assert figures.history(slices, now_s, 0.0).ttft.p50[-2] == pytest.approx(1.0, rel=0.15)

    def test_a_router_that_did_nothing_has_no_shares_and_no_percentiles(self) -> None:
        slices = TimeSlices()
        assert figures.hit_share(slices, 9.0) is None
        assert figures.wrong_credit_share(slices, 9.0) is None
        [first, *_] = figures.summaries(slices, 9.0)
        assert first.ttft == snapshot.LatencyPercentiles(0, None, None, None)
        history = figures.history(slices, 9.0, 1000.0)
        assert (len(history.ttft.p50), set(history.ttft.p50), set(history.requests)) == (SLICES, {None}, {0})

    def test_the_hit_share_is_of_tokens_of_the_window(self) -> None:
        slices = TimeSlices()
        slices.add(Count.PROMPT_TOKENS, 1000, 0.0)
        slices.add(Count.PROMPT_TOKENS, 400, 500.0)
        slices.add(Count.CACHED_TOKENS, 100, 500.0)
        assert figures.hit_share(slices, 505.0) == 0.25


class TestFlows:
    def test_a_steady_flow_has_its_rate_and_a_silent_one_none(self) -> None:
        flows = Flows()
        for step in range(300):
            flows.handed_off(("p", "d"), 1000, step * 0.1)
        [(pair, flow)] = flows.items()
        assert (pair, flow.handoffs, flow.bytes) == (("p", "d"), 300, 300_000)
        assert flow.bytes_per_s(29.9) == pytest.approx(10_000, rel=0.05)
        assert flow.handoffs_per_s(29.9) == pytest.approx(10, rel=0.05)
        assert flow.bytes_per_s(29.9 + 10 * TIME_CONSTANT_S) < 1

    def test_pairs_that_were_silent_longest_make_room(self) -> None:
        flows = Flows()
        for number in range(MAX_PAIRS + 5):
            flows.handed_off((f"p{number}", "d"), 1, 0.0)
            flows.failed(("p0", "d"))
        pairs = [pair for pair, _ in flows.items()]
        assert len(pairs) == MAX_PAIRS
        assert ("p0", "d") in pairs
        assert ("p1", "d") not in pairs


class TestEvents:
    def test_the_same_again_is_counted_and_others_are_listed(self) -> None:
        log = EventLog()
        for _ in range(1000):
            log.note(EventKind.MIGRATION, Severity.WARNING, "d0", "worker lost")
            log.note(EventKind.MIGRATION, Severity.WARNING, "d1", "worker lost")
        assert [(each.subject, each.times) for each in log.latest()] == [("d1", 1000), ("d0", 1000)]

    def test_they_are_bounded(self) -> None:
        log = EventLog()
        for number in range(3 * MAX_EVENTS):
            log.note(EventKind.ROUTER, Severity.INFO, f"r{number}", "ready")
        events = list(log.latest())
        assert (len(events), events[0].subject) == (MAX_EVENTS, f"r{3 * MAX_EVENTS - 1}")

    async def test_workers_that_come_go_break_and_fall_ill_are_noted(self) -> None:
        log = EventLog()
        watch = FleetWatch(log)
        fleet = Fleet("router-0", Estimates(FakeClock()))
        info = cluster_pb2.WorkerInfo(worker_id="d0", epoch=7, model="m", role=cluster_pb2.ROLE_DECODE, address="h:1")

        def said() -> list[str]:
            watch.update(fleet)
            return [each.text for each in reversed(list(log.latest()))]

        fleet.set_directory([info])
        assert said() == [], "it has not come before its link stands"
        [worker] = fleet.workers()
        worker.link.ready = True
        assert said() == ["joined"]
        health = fleet.health._workers[WorkerKey("d0", 7)]
        health.state = HealthState.EJECTED
        fleet.health.ejected[Role.DECODE, EjectReason.STALLED] += 1
        assert said()[1:] == ["healthy → ejected (stalled)"]
        worker.link.ready = False
        assert said()[2:] == ["link lost"]
        fleet.set_directory([])
        assert said()[3:] == ["left"]
        assert said()[4:] == []
        await fleet.close()


def status(*links: tuple[str, float | None], **fields: Any) -> cluster_pb2.ClusterStatus:
    sender = cluster_pb2.WorkerInfo(worker_id="p0", epoch=1, role=cluster_pb2.ROLE_PREFILL, model="m")
    states = [
        worker_pb2.LinkState(peer_worker="d0", state=state, transport="mapped", latency_s=latency_s, bytes_per_s=1e9)
        for state, latency_s in links
    ]
    live = worker_pb2.WorkerState(links=states, load=worker_pb2.WorkerLoad(running_requests=3))
    found = cluster_pb2.WorkerStatus(info=sender, state="ready", restarts=1, live=live)
    return cluster_pb2.ClusterStatus(workers=[found], **fields)


class TestClusterStatus:
    def test_a_flow_is_as_bad_as_its_worst_link_and_as_slow_as_its_slowest(self) -> None:
        own = snapshot.FlowRow("p0", "d0", bytes_per_s=5.0)
        [flow] = cluster_status.with_links([own], status(("ready", 1e-5), ("down", None), ("ready", 3e-5)))
        assert (flow.bytes_per_s, flow.state, flow.latency_s, flow.link_bytes_per_s) == (5.0, "down", 3e-5, 3e9)
        [idle] = cluster_status.with_links([], status(("ready", None)))
        assert (idle.prefill_worker, idle.decode_worker, idle.state, idle.latency_s) == ("p0", "d0", "ready", None)

    def test_the_router_knows_health_and_the_controller_the_load(self) -> None:
        own = snapshot.WorkerRow("p0", "prefill", "m", "1", 1, "ready", "suspect", prefill_tokens_per_s=9.0)
        [worker] = cluster_status.with_all_workers([own], status())
        assert (worker.health, worker.prefill_tokens_per_s, worker.running_requests, worker.restarts) == (
            "suspect", 9.0, 3, 1
        )  # fmt: skip

    def test_an_earlier_life_is_not_taken_for_the_present_one(self) -> None:
        own = snapshot.WorkerRow("p0", "prefill", "m", "99", 1, "leaving", "ejected")
        [worker] = cluster_status.with_all_workers([own], status())
        assert (worker.epoch, worker.health) == ("1", None)
