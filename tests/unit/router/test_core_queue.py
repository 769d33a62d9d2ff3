"""Who waits, who goes next and who is refused, with the pace of real placements: admission and placement together."""

from __future__ import annotations

from itertools import count

import pytest

from router.request_terms import RequestTerms
from router.requests.state_machine import RequestRun
from tandem.config.router import ClassSpec, Disaggregation, RouterSpec
from tandem.errors import DeadlineExceeded, OverloadedError
from tandem.request import RequestState, SamplingParams
from tests.unit.router.core_cluster import Asked, CoreCluster

SLO_S = 0.5
PROMPT_TOKENS = 20
PREFILL_S = 0.05
ONE = SamplingParams(max_tokens=1)
_FIRST_TOKENS = count(100)
# A prefill worker computes twenty of these prompts per second, and is given two at a time.
SPEC = RouterSpec(
    disaggregation=Disaggregation.ALWAYS,
    classes=(
        ClassSpec(name="interactive"),
        ClassSpec(name="urgent", ttft_slo_s=SLO_S),
        ClassSpec(name="batch", batch=True),
    ),
    max_prefill_tokens_in_flight=2 * PROMPT_TOKENS,
)


def slow(*workers: str) -> CoreCluster:
    cluster = CoreCluster(*(workers or ("p0", "d0")), spec=SPEC)
    for worker in cluster.workers.values():
        worker.prefill_s = PREFILL_S
    return cluster


def ask(cluster: CoreCluster, priority: str = "interactive", tenant: str = "") -> Asked:
    """A prompt of its own: none waits for blocks that another computes."""
    prompt = [next(_FIRST_TOKENS), *[70] * (PROMPT_TOKENS - 1)]
    return cluster.ask(prompt, ONE, RequestTerms(priority, tenant))


def in_order(*asked: Asked) -> list[Asked]:
    """As they were dispatched."""
    return sorted(asked, key=lambda each: each.final.timeline.ttft_s + each.run.received_s)


# ---- slices


def test_one_pump_places_no_more_than_asked_and_another_follows_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = CoreCluster("p0", spec=SPEC.model_copy(update={"max_prefill_tokens_in_flight": 1 << 20}))
    asked = [ask(cluster) for _ in range(20)]
    placed = []

    def pump() -> None:
        cluster.core.pump(8)
        placed.append(len(cluster.worker("p0").frames("generate")))  # answers of one token

    monkeypatch.setattr(cluster, "pump", pump)
    cluster.add("d0")
    cluster.run()
    assert placed[:3] == [8, 16, 20]
    assert all(each.end is not None for each in asked)
    cluster.check_settled()


# ---- refusals


def test_too_long_a_wait_is_refused_at_once_with_the_time_until_it_fits() -> None:
    cluster = slow()
    flood = [ask(cluster) for _ in range(40)]
    cluster.run(8 * PREFILL_S + 0.01)
    other = ask(cluster, "urgent", "other")
    taken, refused = [], []
    for _ in range(40):
        try:
            taken.append(ask(cluster, "urgent"))
        except OverloadedError as error:
            refused.append(error)
    assert cluster.metric('tandem_admission_refusals_total{class="urgent",reason="slo"}') == len(refused) > 10
    assert all(0 < (error.retry_after_s or 0) < 40 * PREFILL_S for error in refused)
    assert cluster.metric('tandem_drain_tokens_per_second{model="tiny"}') == pytest.approx(400, rel=0.05)
    cluster.run()
    assert other.final.timeline.ttft_s < SLO_S, "another class has a share of its own"
    assert all(each.final.timeline.ttft_s < SLO_S for each in taken), "what is taken meets its objective"
    assert cluster.ends("finished") == len(flood) + len(taken) + 1
    cluster.check_settled()


def test_a_full_queue_refuses_at_once_and_leaves_those_that_wait() -> None:
    cluster = CoreCluster(spec=RouterSpec(max_queued_requests=2))
    for _ in range(2):
        cluster.ask()
    with pytest.raises(OverloadedError, match="the queue is full") as refused:
        cluster.ask()
    assert refused.value.retry_after_s == 1.0
    assert (cluster.core.active, cluster.ends("rejected")) == (2, 1)


# ---- fairness


def test_a_tenants_flood_does_not_hold_up_another_tenant() -> None:
    cluster = slow()
    flood = [ask(cluster, tenant="flood") for _ in range(60)]
    cluster.run(1.5 * PREFILL_S)
    quiet = [ask(cluster, tenant="quiet") for _ in range(5)]
    cluster.run()
    order = in_order(*flood, *quiet)
    places = [place for place, each in enumerate(order) if each in quiet]
    assert places[0] <= 4, "behind the two that were dispatched, and one of each tenant"
    assert places[-1] - places[0] + 1 - len(quiet) <= 6, "turn by turn, not behind those that came before"
    cluster.check_settled()


def test_batch_waits_for_everybody_else() -> None:
    cluster = slow()
    batch = [ask(cluster, "batch") for _ in range(10)]
    cluster.run(0.5 * PREFILL_S)
    others = [ask(cluster) for _ in range(10)]
    cluster.run()
    order = in_order(*batch, *others)
    last = max(order.index(each) for each in others)
    assert sum(each in batch for each in order[:last]) <= 2, "only those dispatched before the first of them came"
    assert cluster.ends("finished") == 20
    cluster.check_settled()


def test_a_long_batch_prefill_gives_way_and_is_done_later() -> None:
    cluster = CoreCluster("p0", "d0", spec=SPEC)
    prefill = cluster.worker("p0")
    prefill.unanswered = frozenset({"prefill"})
    batch = cluster.ask(10 * PROMPT_TOKENS, terms=RequestTerms("batch"))
    cluster.run(1.0)
    prefill.unanswered = frozenset()
    other = ask(cluster)
    assert prefill.cancelled == prefill.frames("prefill")[:1] == ["r0.1"]
    cluster.run()
    assert other.final.timeline.queue_s < batch.final.timeline.queue_s
    assert batch.run.attempts == 2
    assert batch.tokens == [*cluster.answer]
    cluster.check_settled()


# ---- deadlines


@pytest.mark.parametrize("stage", ["queue", "reserve", "prefill", "join", "decode"])
def test_a_deadline_ends_a_request_wherever_it_is(stage: str) -> None:
    cluster = CoreCluster("p0", "d0", spec=SPEC)
    for worker in cluster.workers.values():
        worker.unanswered, worker.token_s = frozenset({stage}), 0.15
        if stage == "queue":
            worker.lose()
    if stage == "join":
        cluster.worker("p0").reports = False
    asked = cluster.ask(terms=RequestTerms("interactive", deadline_s=0.4))
    cluster.run()
    assert isinstance(asked.error, DeadlineExceeded)
    assert asked.end is not None
    assert asked.end.state is (RequestState.REJECTED if stage in ("queue", "reserve") else RequestState.FAILED)
    assert cluster.metric('tandem_requests_total{code="deadline_exceeded"') == 1
    assert cluster.worker("d0").cancelled == ([] if stage == "queue" else ["r0.1"])
    assert cluster.worker("p0").cancelled == (["r0.1"] if stage in ("prefill", "join") else [])
    cluster.check_settled()


def test_a_deadline_that_passed_already_is_refused() -> None:
    cluster = CoreCluster("p0", "d0", spec=SPEC)
    cluster.run(1.0)
    with pytest.raises(DeadlineExceeded):
        cluster.ask(terms=RequestTerms("interactive", deadline_s=0.5))
    assert cluster.ends("rejected") == 1
    assert cluster.worker("d0").received == []


# ---- readers


def test_a_reader_that_stays_away_ends_its_request() -> None:
    class Unread(CoreCluster):
        def emit(self, run: RequestRun, output: object) -> bool:
            return False

    cluster = Unread("p0", "d0")
    asked = cluster.ask()
    cluster.run()
    assert "unread" in asked.error.message
    assert (cluster.ends("cancelled"), len(asked.tokens)) == (1, 1)
    assert cluster.worker("d0").cancelled == ["r0.1"]
    cluster.check_settled()
