"""What the autoscaler takes the load to be, from counters that only grow."""

from __future__ import annotations

import pytest

from cluster.control.scaling.observed_load import ObservedLoad
from planner.pool_forecast import LocalPrompts
from router.policies.pace import BATCH_SIZES, START_PACE
from tandem.v1 import trace_pb2, worker_pb2


def demand(
    requests: int, *, queued_tokens: int = 0, missed_ttft: int = 0, ttft_s: float = 0.0
) -> trace_pb2.ModelDemand:
    """So many requests of 100 prompt tokens, 25 of them cached, that were answered with 40 tokens. Decode workers
    computed a fifth of the rest."""
    return trace_pb2.ModelDemand(
        requests=requests, prompt_tokens=100 * requests, first_tokens=requests, prefilled_tokens=100 * requests,
        cached_tokens=25 * requests, local_tokens=15 * requests, finished=requests, answer_tokens=40 * requests,
        judged=requests, queued_tokens=queued_tokens, missed_ttft=missed_ttft, ttft_s=ttft_s,
    )  # fmt: skip


def test_rates_and_means_are_those_of_the_last_seconds_of_all_routers() -> None:
    observed = ObservedLoad(0.0)
    for second in range(1, 31):
        observed.note({"r0": (1, demand(4 * second)), "r1": (9, demand(2 * second, queued_tokens=200))}, float(second))
    load = observed.load(
        [worker_pb2.WorkerLoad(waiting_tokens=30, running_requests=7)], [worker_pb2.WorkerLoad(running_requests=5)]
    )
    assert load.requests_per_s == pytest.approx(6)
    assert (load.uncached_tokens, load.answer_tokens, load.context_tokens) == (75, 40, 140)
    assert load.queued_tokens == 0.75 * 200 + 30
    assert load.decoding_requests == 5
    assert load.local_share == pytest.approx(0.2)


def test_a_router_that_began_anew_or_did_not_answer_loses_nothing_and_adds_nothing() -> None:
    observed = ObservedLoad(0.0)
    observed.note({"r0": (1, demand(10))}, 1.0)
    observed.note({}, 2.0)
    observed.note({"r0": (1, demand(16))}, 3.0)
    observed.note({"r0": (2, demand(3))}, 4.0)  # its counters began anew
    assert observed.load([], []).requests_per_s == pytest.approx((6 + 3) / 3)


def test_what_routers_counted_before_they_were_first_seen_is_no_load_now() -> None:
    """As after the controller was replaced, or a changed spec: rates of hours would be taken for those of a second."""
    observed = ObservedLoad(0.0)
    observed.note({"r0": (1, demand(100_000))}, 2.0)
    load = observed.load([], [])
    assert (load.requests_per_s, load.uncached_tokens, load.answer_tokens) == (0, 75, 40)
    observed.note({"r0": (1, demand(100_004)), "r1": (1, demand(50_000))}, 4.0)  # r1 did not answer before
    observed.note({"r0": (1, demand(100_008)), "r1": (1, demand(50_006))}, 6.0)
    assert observed.load([], []).requests_per_s == pytest.approx((8 + 6) / 4)


def test_while_nothing_comes_the_means_stay_and_the_rate_falls_to_nothing() -> None:
    observed = ObservedLoad(0.0)
    for second in range(1, 60):
        observed.note({"r0": (1, demand(min(second, 10)))}, float(second))
    load = observed.load([], [])
    assert (load.requests_per_s, load.uncached_tokens, load.answer_tokens) == (0, 75, 40)


def test_measurements_are_those_since_the_last_change() -> None:
    observed = ObservedLoad(0.0)
    observed.note({"r0": (1, demand(10, missed_ttft=10, ttft_s=50.0))}, 4.0)
    observed.note({"r0": (1, demand(15, missed_ttft=11, ttft_s=51.0))}, 6.0)
    found = observed.measured(4.0)
    assert (found.requests, found.ttft_s, found.judged, found.missed_ttft) == (5, 0.2, 5, 1)
    assert observed.measured(6.0).ttft_s is None


def test_paces_that_are_not_as_ours_are_left_out() -> None:
    observed = ObservedLoad(0.0)
    good = trace_pb2.Pace(prefill_s_per_token=0.001, tpot_s=[0.05] * len(BATCH_SIZES))
    other = trace_pb2.Pace(prefill_s_per_token=0.003, tpot_s=[0.07] * len(BATCH_SIZES))
    strange = trace_pb2.Pace(prefill_s_per_token=0.5, tpot_s=[1.0])
    assert observed.capability(8, 100, LocalPrompts()).prefill == START_PACE
    reports = {
        "r0": (1, trace_pb2.ModelDemand(prefill=good, decode=good)),
        "r1": (1, trace_pb2.ModelDemand(prefill=other, decode=strange)),
    }
    observed.note(reports, 1.0)
    can = observed.capability(8, 100, LocalPrompts())
    assert can.prefill.prefill_s_per_token == pytest.approx(0.002)
    assert can.prefill.tpot_at_s(1) == pytest.approx(0.06)
    assert can.decode.tpot_at_s(1) == pytest.approx(0.05)
    observed.note({"r0": (1, trace_pb2.ModelDemand(decode=other))}, 2.0)  # aggregated: decode workers prefill
    assert observed.capability(8, 100, LocalPrompts()).prefill.prefill_s_per_token == pytest.approx(0.003)
