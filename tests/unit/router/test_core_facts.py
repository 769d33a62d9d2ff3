"""What observers make of the facts about requests: metrics, traces, demand, paces and the health of workers."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.causes import HandoffCause
from router.dashboard.events import EventKind
from router.observe.demand import DemandMeter
from router.observe.request_tap import MAX_WAITING
from router.observe.trace import Stage
from router.policies.pace import BATCH_SIZES
from router.policies.pace_estimates import REFRESH_S
from router.prefix_index.mirror import WorkerKey
from router.request_terms import RequestTerms
from router.workers.health import EjectReason, HealthState
from tandem.config.model import Role
from tandem.config.router import ClassSpec, Disaggregation, PolicyName, RouterSpec
from tandem.errors import ErrorCode
from tandem.v1 import trace_pb2
from tests.unit.router.core_cluster import MODEL, CoreCluster

ANSWER = tuple(range(70, 83))
BATCH = RequestTerms("batch")


# ---- objectives and stages


def test_gaps_between_tokens_and_objectives_are_counted() -> None:
    classes = (ClassSpec(name="interactive", ttft_slo_s=30, tpot_slo_s=0.04),)
    cluster = CoreCluster(
        "p0", "d0", spec=RouterSpec(disaggregation=Disaggregation.ALWAYS, classes=classes), answer=ANSWER
    )
    for token_s in (0.05, 0.05, 0.03):
        cluster.worker("d0").token_s = token_s
        cluster.ask()
        cluster.run()
    gaps = len(ANSWER) - 1
    assert cluster.metric("tandem_itl_seconds_count") == 3 * gaps
    assert cluster.metric("tandem_itl_seconds_sum") == pytest.approx(gaps * 0.13)
    outcomes = 'tandem_slo_requests_total{class="interactive",model="tiny",outcome='
    assert cluster.metric(f'{outcomes}"missed_tpot"}}') == 2
    assert cluster.metric(f'{outcomes}"met"}}') == 1
    assert cluster.metric('tandem_class_slo_seconds{class="interactive",objective="tpot"}') == 0.04


def test_the_parts_of_the_time_to_first_token_add_up_with_a_handoff_and_without() -> None:
    cluster = CoreCluster("p0", "d0")
    decode = cluster.worker("d0")
    decode.refusals, decode.reserve_s = 1, 0.25
    for worker in cluster.workers.values():
        worker.prefill_s = 1.0
    cluster.ask()
    cluster.run()
    cluster.worker("p0").lose()
    cluster.ask()
    cluster.run()

    def summed(stage: Stage, what: str = "sum") -> float:
        return cluster.metric(f'tandem_ttft_stage_seconds_{what}{{model="tiny",stage="{stage}"}}')

    stages = (Stage.QUEUE, Stage.RETRY, Stage.RESERVE, Stage.PREFILL, Stage.FIRST_TOKEN)
    assert [summed(stage, "count") for stage in stages] == [3, 1, 1, 2, 2]
    assert [summed(stage) for stage in stages] == pytest.approx([0.05, 0.0, 0.25, 2.0, 0.0])
    assert sum(map(summed, stages)) == pytest.approx(cluster.metric("tandem_ttft_seconds_sum"))


# ---- attempts that fail


def test_a_failed_handoff_is_counted_by_its_cause_and_stays_in_the_trace() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("d0").failing_handoffs = 1
    asked = cluster.ask()
    cluster.run()
    assert cluster.metric('tandem_handoff_failures_total{cause="digest_mismatch",model="tiny"}') == 1
    assert cluster.metric("tandem_handoff_failures_total") == 1
    trace = cluster.observers.traces.of(asked.run).to_wire()
    assert trace.state == "finished"
    assert [(each.error, each.cause) for each in trace.attempts] == [
        (ErrorCode.HANDOFF_FAILED, HandoffCause.DIGEST_MISMATCH), ("", ""),
    ]  # fmt: skip
    assert [(each.prefill_worker, each.decode_worker) for each in trace.attempts] == [("p0", "d0"), ("", "d0")]


def test_a_refused_reservation_is_an_attempt() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("d0").refusals = 1
    asked = cluster.ask()
    cluster.run()
    first, second = cluster.observers.traces.of(asked.run).to_wire().attempts
    assert (first.error, first.cause, second.error) == ("kv_exhausted", "", "")


def test_failed_handoffs_and_migrations_are_events_of_the_dashboard() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("d0").failing_handoffs = 1
    cluster.worker("d0").refusals = 1
    cluster.ask()
    cluster.run()
    events = {event.kind: (event.subject, event.text, event.times) for event in cluster.feed.events.latest()}
    assert events[EventKind.HANDOFF_FAILED] == ("p0 → d0", "digest mismatch", 1)
    assert events[EventKind.MIGRATION] == ("d0", "requests requeued: handoff failed", 1), "a refusal is none"


# ---- demand


def demand(cluster: CoreCluster) -> trace_pb2.ModelDemand:
    models = cluster.observers.demand.report(cluster.core.waiting(), cluster.fleet).models
    return next((each for each in models if each.model == MODEL), trace_pb2.ModelDemand())


def test_requests_are_counted_from_their_coming_to_their_end() -> None:
    cluster = CoreCluster("p0", "d0")
    assert demand(cluster) == trace_pb2.ModelDemand(), "no request came yet"
    cluster.worker("p0").cached_tokens, cluster.worker("p0").prefill_s = 16, 0.5
    for _ in range(3):
        cluster.ask(80)
        cluster.run()
    found = demand(cluster)
    assert (found.requests, found.prompt_tokens, found.first_tokens, found.finished) == (3, 240, 3, 3)
    assert (found.prefilled_tokens, found.cached_tokens, found.answer_tokens) == (240, 48, 12)
    assert (found.judged, found.missed_ttft, found.missed_tpot) == (3, 0, 0)
    assert (found.ttft_s, found.queued_tokens) == (1.5, 0)
    assert len(found.prefill.tpot_s) == len(found.decode.tpot_s) == len(BATCH_SIZES)
    assert found.prefill.prefill_s_per_token == pytest.approx(0.5 / 64)
    assert found.decode.reserve_s == pytest.approx(cluster.worker("d0").worker.estimates.pace().reserve_s)


def test_what_waits_is_told_and_refusals_count_as_missed() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("d0").lose()
    terms = RequestTerms("interactive", deadline_s=0.5)
    for _ in range(2):
        cluster.ask(40, terms=terms)
    found = demand(cluster)
    assert (found.requests, found.queued_tokens, found.first_tokens) == (2, 80, 0)
    assert found.HasField("prefill")
    assert not found.HasField("decode")
    cluster.run()
    found = demand(cluster)
    assert (found.queued_tokens, found.judged, found.missed_ttft) == (0, 2, 2)


def test_batch_classes_are_left_out_of_the_demand() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.ask(40, terms=BATCH)
    cluster.run()
    assert cluster.ends("finished") == 1
    found = demand(cluster)
    assert (found.requests, found.first_tokens, found.judged) == (0, 0, 0)
    meter = DemandMeter((ClassSpec(name="batch", batch=True),), cluster.fleet)
    assert meter.report((), cluster.fleet).models == []


# ---- paces


def test_a_handoff_shows_the_pace_of_both_workers() -> None:
    cluster = CoreCluster("p0", "d0", answer=range(70, 90))
    p0, d0 = cluster.worker("p0"), cluster.worker("d0")
    p0.prefill_s, d0.reserve_s, d0.handoff_s, d0.token_s = 0.4, 0.01, 0.016, 0.02
    cluster.ask(256)
    cluster.run()
    cluster.run(REFRESH_S)
    prefill, decode = p0.worker.estimates, d0.worker.estimates
    assert prefill.pace().prefill_s_per_token == pytest.approx(0.4 / 256)
    assert decode.pace().tpot_at_s(1) == pytest.approx(0.02)
    assert decode.pace().transfer_s_per_token == pytest.approx(0.016 / 256)
    assert decode.pace().reserve_s == pytest.approx(0.01)
    assert prefill.transfer_to == {("d0", 1): pytest.approx(0.016 / 256)}
    assert cluster.fleet.estimates.answer_tokens(MODEL) == 20


def test_what_a_worker_had_cached_is_no_work_of_it() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("p0").cached_tokens, cluster.worker("p0").prefill_s = 160, 0.1
    cluster.ask(256)
    cluster.run()
    cluster.run(REFRESH_S)
    assert cluster.worker("p0").worker.estimates.pace().prefill_s_per_token == pytest.approx(0.1 / 96)


# ---- health


def health(cluster: CoreCluster, name: str) -> HealthState:
    return cluster.fleet.health.state(WorkerKey(name, 1))


def test_a_failing_worker_is_left_out_and_no_answer_is_lost() -> None:
    cluster = CoreCluster("p0", "p1", "d0", "d1", answer=ANSWER)
    d0 = cluster.worker("d0")
    d0.failing_handoffs = 1000
    for _ in range(8):
        asked = cluster.ask()
        cluster.run()
        assert asked.tokens == [*ANSWER]
    assert health(cluster, "d0") is HealthState.EJECTED
    joins = len(d0.frames("join"))
    asked = cluster.ask()
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert len(d0.frames("join")) == joins, "it gets nothing more"
    assert health(cluster, "p0") is HealthState.HEALTHY, "its partner in those handoffs worked with others"
    cluster.check_settled()


def test_a_worker_that_crawls_beside_a_quick_peer_is_left_out() -> None:
    """By a policy that looks at nothing: the default one would see how slow it is, and soon leave it alone."""
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, policy=PolicyName.ROUND_ROBIN)
    cluster = CoreCluster("p0", "d0", "d1", spec=spec, answer=ANSWER)
    cluster.worker("d0").token_s, cluster.worker("d1").token_s = 0.1, 0.01
    while health(cluster, "d0") is HealthState.HEALTHY:
        asked = [cluster.ask() for _ in range(4)]
        cluster.run()
        assert [each.tokens for each in asked] == [[*ANSWER]] * 4
        assert cluster.loop.now_s() < 60.0
    assert health(cluster, "d0") is HealthState.EJECTED
    assert health(cluster, "d1") is HealthState.HEALTHY
    assert cluster.fleet.health.ejected == {(Role.DECODE, EjectReason.SLOW): 1}
    joins = cluster.worker("d0").frames("join")
    cluster.ask()
    cluster.run()
    assert cluster.worker("d0").frames("join") == joins, "it gets nothing more"
    assert cluster.metric("tandem_retries_total") == 0, "what it has it may finish"
    cluster.check_settled()


# ---- recordings of requests


async def test_a_listener_that_reads_too_slowly_costs_nothing_but_its_own_requests() -> None:
    cluster = CoreCluster("p0", "d0")
    tap = cluster.observers.tap
    listen = tap.listen(b"0123456789abcdef", "")
    reading = asyncio.ensure_future(anext(listen))
    await asyncio.sleep(0)
    assert len(tap._listeners) == 1
    cluster.ask()
    cluster.run()
    assert (await reading).output_tokens == len(cluster.answer)
    for _ in range(MAX_WAITING + 9):
        cluster.ask()
        cluster.run()
    assert (await anext(listen)).lost == 9
    assert (await anext(listen)).lost == 0
    await listen.aclose()
    assert not tap._listeners
    cluster.check_settled()
