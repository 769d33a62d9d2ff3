"""Where a request goes: placement over a fleet with accounts, the prefix index and sessions, and refusing workers."""

from __future__ import annotations

import pytest

from tandem.config.router import Disaggregation, PolicyName, RouterSpec
from tandem.errors import ErrorCode
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.kvcache.prefix_events import PrefixSnapshot, join_hashes
from tandem.request import FinishReason, RequestState
from tests.unit.router.core_cluster import CoreCluster

# ---- placement


@pytest.mark.parametrize(("prompt_tokens", "is_local"), [(32, True), (33, False)])
def test_short_prompts_stay_local_and_long_ones_are_handed_off(prompt_tokens: int, is_local: bool) -> None:
    cluster = CoreCluster("p0", "d0", spec=RouterSpec(disaggregation=Disaggregation.AUTO))
    cluster.ask(prompt_tokens)
    cluster.run()
    assert bool(cluster.worker("d0").frames("generate")) is is_local
    assert bool(cluster.worker("p0").frames("prefill")) is not is_local
    cluster.check_settled()


def test_a_prefill_worker_is_given_no_more_than_its_budget() -> None:
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, max_prefill_tokens_in_flight=40)
    cluster = CoreCluster("p0", "d0", spec=spec)
    cluster.worker("p0").prefill_s, cluster.worker("d0").token_s = 1.0, 10.0
    both = [cluster.ask(30) for _ in range(2)]
    cluster.run(0.9)
    assert len(cluster.worker("p0").frames("prefill")) == 1
    assert cluster.metric('tandem_waits_total{model="tiny",reason="prefill_full"}') == 1
    cluster.run(0.2)
    assert len(cluster.worker("p0").frames("prefill")) == 2, "room from the first token on"
    cluster.run()
    assert [each.final.timeline.queue_s for each in both] == [0.0, 1.0]
    cluster.check_settled()


def test_a_prompt_that_is_being_computed_draws_the_next_one_like_it() -> None:
    cluster = CoreCluster("p0", "p1", "d0")
    for name in ("p0", "p1"):
        cluster.worker(name).unanswered = frozenset({"prefill"})
    one, another = range(20, 220), range(120, 320)
    asked = []
    for prompt in (one, another, another, one):
        asked.append(cluster.ask(prompt))
        cluster.run(0.01)
    placed = [each.run.prefill and each.run.prefill.worker_id for each in asked]
    assert placed == ["p0", "p1", "p1", "p0"]
    for each in asked:
        cluster.cancel(each)
    cluster.check_settled()


@pytest.mark.parametrize(("cached", "wrong"), [(32, 0), (16, 16), (0, 32)])
def test_credit_that_a_worker_does_not_honour_is_counted(cached: int, wrong: int) -> None:
    cluster, prompt = CoreCluster("p0", "d0"), range(60, 100)
    hashes = join_hashes(hash_blocks(list(prompt), 16, HashKey("f")))
    for name in ("p0", "d0"):
        cluster.mirror.load(name, PrefixSnapshot(1, 0, hashes))
    cluster.worker("p0").cached_tokens = cached
    asked = cluster.ask(prompt)
    cluster.run()
    assert asked.run.credited_tokens == 32
    assert cluster.metric('tandem_index_credit_tokens_total{kind="given"') == 32
    assert cluster.metric('tandem_index_credit_tokens_total{kind="wrong"') == wrong
    assert cluster.metric("tandem_index_blocks ") == 2
    cluster.check_settled()


class TestSessions:
    @pytest.mark.parametrize("policy", [PolicyName.EXPECTED_TTFT, PolicyName.ROUND_ROBIN])
    def test_requests_of_a_session_meet_again_unless_each_worker_has_its_turn(self, policy: PolicyName) -> None:
        cluster = CoreCluster("p0", "d0", "d1", spec=RouterSpec(disaggregation=Disaggregation.ALWAYS, policy=policy))
        used = []
        for number in range(16):
            asked = []
            for _ in range(4):
                asked.append(cluster.ask(session=bytes([number]) * 8))
                cluster.run()
            used.append([each.final.timeline.decode_worker for each in asked])
        if policy is PolicyName.ROUND_ROBIN:
            assert all(sorted(names) == ["d0", "d0", "d1", "d1"] for names in used)
        else:
            assert all(len(set(names)) == 1 for names in used)
            assert {names[0] for names in used} == {"d0", "d1"}
        cluster.check_settled()


# ---- refusals


def test_a_refused_reservation_goes_to_the_next_decode_worker() -> None:
    cluster = CoreCluster("p0", "d0", "d1")
    cluster.worker("d0").refusals = 1
    asked = cluster.ask()
    cluster.run()
    assert len(cluster.worker("d0").frames("reserve")) == 1
    assert cluster.worker("d1").frames("join") == ["r0.1"], "the attempt goes on, with its prefill worker"
    assert asked.final.timeline.decode_worker == "d1"
    assert cluster.metric("tandem_retries_total") == 0
    cluster.check_settled()


def test_a_request_that_is_refused_everywhere_waits_and_asks_all_of_them_again() -> None:
    cluster = CoreCluster("p0", "d0", "d1")
    for name in ("d0", "d1"):
        cluster.worker(name).refusals = 2
    asked = cluster.ask()
    cluster.run()
    assert asked.final.reason is FinishReason.LENGTH
    reserves = [len(cluster.worker(name).frames("reserve")) for name in ("d0", "d1")]
    assert sorted(reserves) == [2, 3]
    assert asked.run.attempts == 3
    assert asked.final.timeline.queue_s == pytest.approx(0.1), "two holds of 50 ms"
    assert cluster.metric('tandem_retries_total{code="kv_exhausted"') == 2
    cluster.check_settled()


def test_refusals_are_no_migrations() -> None:
    cluster = CoreCluster("p0", "d0", spec=RouterSpec(disaggregation=Disaggregation.ALWAYS, max_migrations=0))
    cluster.worker("d0").refusals = 5
    asked = cluster.ask()
    cluster.run()
    assert asked.end is not None
    assert asked.end.state is RequestState.FINISHED


def test_a_reservation_that_is_never_granted_ends_with_kv_exhausted() -> None:
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, queue_timeout_s=0.3)
    cluster = CoreCluster("p0", "d0", spec=spec)
    cluster.worker("d0").refusals = 1000
    asked = cluster.ask()
    cluster.run()
    assert asked.error.code is ErrorCode.KV_EXHAUSTED
    assert cluster.loop.now_s() == pytest.approx(0.3, abs=0.05)
    assert (asked.error.wire.http_status, asked.error.wire.retryable) == (503, True)
    assert cluster.ends("rejected") == 1
    cluster.check_settled()
