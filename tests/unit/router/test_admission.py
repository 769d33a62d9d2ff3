from collections.abc import Sequence

import pytest

from router.admission.admission import REFUSED_HOLD_S, SLO_SHARE, Admission, Refusal
from router.terms import RequestTerms
from tandem.config.spec import ClassSpec
from tandem.errors import DeadlineExceeded, KvExhausted, NoWorker, OverloadedError

CLASSES = (
    ClassSpec(name="interactive"),
    ClassSpec(name="urgent", weight=3.0, ttft_slo_s=2.0),
    ClassSpec(name="batch", batch=True, queue_timeout_s=100.0),
)
TERMS = RequestTerms("interactive")
URGENT = RequestTerms("urgent")
BATCH = RequestTerms("batch")
BUDGET = 400


def queue(limit: int = 3, timeout_s: float = 10.0, classes: Sequence[ClassSpec] = CLASSES) -> Admission[str]:
    return Admission(classes, max_queued_requests=limit, queue_timeout_s=timeout_s, budget_tokens=BUDGET)


def take(admission: Admission[str], now_s: float, room: int = 100) -> list[str]:
    taken: list[str] = []

    def place(item: str) -> bool:
        if len(taken) == room:
            return False
        taken.append(item)
        return True

    admission.dispatch(now_s, place, one_worker)
    return taken


def one_worker(model: str) -> int:
    return 1


def offer(
    queue: Admission[str], items: str, terms: RequestTerms = TERMS, *, tokens: int = 100, now_s: float = 0.0
) -> None:
    for item in items:
        assert queue.offer("m", item, terms, tokens, now_s) == []


def paced(admission: Admission[str], tokens_per_s: int = 100) -> Admission[str]:
    """A pool that was seen to prefill at this pace, and is idle at 4 s."""
    for second in range(4):
        admission.offer("m", f"first{second}", TERMS, tokens_per_s, 0.0)
    admission.offer("m", "rest", TERMS, tokens_per_s, 0.0)
    for second in range(4):
        take(admission, float(second), room=1)
        admission.first_token(f"first{second}", second + 0.999_999)
    assert take(admission, 4.0) == ["rest"]
    admission.remove("rest")
    return admission


# ---- the line


def test_first_come_first_served_as_far_as_there_is_room() -> None:
    admission = queue()
    offer(admission, "abc")
    assert take(admission, 1.0, room=2) == ["a", "b"]
    assert take(admission, 1.0) == ["c"]
    assert len(admission) == 0


def test_full_queue_refuses_with_a_retry_delay() -> None:
    admission = queue(limit=1)
    offer(admission, "a")
    with pytest.raises(OverloadedError) as caught:
        admission.offer("m", "b", TERMS, 1, 4.0)
    assert caught.value.retry_after_s == 4.0
    assert admission.refusals == {("interactive", Refusal.QUEUE_FULL): 1}


def test_one_model_without_room_does_not_hold_up_another() -> None:
    admission = queue()
    admission.offer("m", "a", TERMS, 1, 0.0)
    admission.offer("n", "b", TERMS, 1, 0.0)
    taken: list[str] = []

    def take(item: str) -> bool:
        if item == "b":
            taken.append(item)
        return item == "b"

    admission.dispatch(0.0, take, one_worker)
    assert taken == ["b"]
    assert admission.items() == ["a"]


def test_wait_without_any_worker_ends_with_no_worker() -> None:
    admission = queue(timeout_s=10.0)
    offer(admission, "a", now_s=1.0)
    admission.dispatch(1.5, lambda _: False, lambda _: 0)
    assert admission.next_due_s(1.0) == 11.0
    assert admission.expire(10.9) == []
    [(item, error)] = admission.expire(11.0)
    assert item == "a"
    assert isinstance(error, NoWorker)
    assert error.wire.retryable


def test_wait_beside_busy_workers_ends_with_overloaded() -> None:
    admission = queue(timeout_s=10.0)
    offer(admission, "a", now_s=1.0)
    assert take(admission, 5.0, room=0) == []
    [(_, error)] = admission.expire(11.0)
    assert isinstance(error, OverloadedError)
    assert admission.next_due_s(11.0) is None


def test_a_class_may_wait_longer_than_others() -> None:
    admission = queue(timeout_s=10.0)
    offer(admission, "a", BATCH)
    assert admission.expire(99.0) == []
    assert [item for item, _ in admission.expire(100.0)] == ["a"]


def test_refused_request_waits_first_in_line_and_keeps_its_wait() -> None:
    admission = queue(timeout_s=10.0)
    offer(admission, "b", now_s=1.0)
    refusal = KvExhausted("no blocks")
    admission.put_back("m", "a", TERMS, 100, since_s=0.0, now_s=2.0, refusal=refusal)
    assert take(admission, 2.0) == []
    assert admission.next_due_s(2.0) == pytest.approx(2.0 + REFUSED_HOLD_S)
    [(item, error)] = admission.expire(10.0)
    assert item == "a"
    assert isinstance(error, KvExhausted)
    assert take(admission, 10.0) == ["b"]


def test_put_back_comes_before_the_others_after_its_hold() -> None:
    admission = queue()
    offer(admission, "b")
    admission.put_back("m", "a", TERMS, 100, since_s=0.0, now_s=0.0, refusal=KvExhausted("no blocks"))
    assert take(admission, REFUSED_HOLD_S) == ["a", "b"]


def test_request_that_ended_is_not_dispatched() -> None:
    admission = queue()
    offer(admission, "a")
    admission.remove("a")
    admission.remove("a")
    assert take(admission, 0.0) == []
    assert admission.next_due_s(0.0) is None


def test_request_that_ends_while_it_is_placed_leaves_the_others_their_turn() -> None:
    admission = queue()
    offer(admission, "ab")
    taken: list[str] = []

    def place(item: str) -> bool:
        if item == "a":
            admission.remove("a")
        else:
            taken.append(item)
        return True

    admission.dispatch(0.0, place, one_worker)
    assert taken == ["b"]
    assert len(admission) == 0


def test_many_requests_leave_nothing_behind() -> None:
    admission = queue()
    for number in range(10_000):
        admission.offer("m", f"r{number}", TERMS, 1, 0.0)
        take(admission, 0.0)
        admission.first_token(f"r{number}", 0.0)
    assert len(admission._expiries) < 200
    assert not admission._prefilling


# ---- tenants and classes


def test_tenants_take_turns_by_tokens() -> None:
    admission = queue(limit=100)
    offer(admission, "abcdef", RequestTerms("interactive", "many"))
    offer(admission, "XY", RequestTerms("interactive", "few"))
    assert "".join(take(admission, 0.0)) == "aXbYcdef"


def test_classes_share_by_weight_and_tenants_alike_within() -> None:
    classes = (ClassSpec(name="interactive"), ClassSpec(name="urgent", weight=3.0))
    admission = queue(limit=100, classes=classes)
    offer(admission, "abcdefgh")
    offer(admission, "ABCD", RequestTerms("urgent", "x"))
    offer(admission, "STUV", RequestTerms("urgent", "y"))
    first = take(admission, 0.0, room=8)
    assert sum(item.isupper() for item in first) == 6
    assert {item for item in first if item.isupper()} == set("ABCSTU")


def test_a_full_queue_gives_a_place_to_who_has_less_in_it() -> None:
    admission = queue(limit=4)
    offer(admission, "abcd", RequestTerms("interactive", "many"))
    [(item, error)] = admission.offer("m", "X", RequestTerms("interactive", "few"), 1, 0.0)
    assert item == "d", "the newest of the longest line"
    assert isinstance(error, OverloadedError)
    assert [item for item, _ in admission.offer("m", "Y", RequestTerms("interactive", "few"), 1, 0.0)] == ["c"]
    with pytest.raises(OverloadedError):
        admission.offer("m", "Z", RequestTerms("interactive", "few"), 1, 0.0)
    with pytest.raises(OverloadedError):
        admission.offer("m", "e", RequestTerms("interactive", "many"), 1, 0.0)
    assert "".join(sorted(admission.items())) == "XYab"


def test_a_full_queue_gives_places_of_batch_requests_to_others_only() -> None:
    admission = queue(limit=2)
    offer(admission, "ab")
    with pytest.raises(OverloadedError):
        admission.offer("m", "X", BATCH, 1, 0.0)
    admission = queue(limit=2)
    offer(admission, "XY", BATCH)
    assert [item for item, _ in admission.offer("m", "a", TERMS, 1, 0.0)] == ["Y"]
    assert [item for item, _ in admission.offer("m", "b", TERMS, 1, 0.0)] == ["X"]


# ---- batch


def test_batch_is_dispatched_only_while_nobody_else_waits() -> None:
    admission = queue(limit=100)
    offer(admission, "XY", BATCH)
    offer(admission, "ab")
    assert take(admission, 0.0, room=1) == ["a"]
    assert take(admission, 0.0) == ["b", "X", "Y"]


def test_batch_takes_half_of_the_dispatch_budget_at_most() -> None:
    admission = queue(limit=100)
    offer(admission, "XYZ", BATCH)
    offer(admission, "a")
    assert take(admission, 0.0) == ["a", "X", "Y"]
    admission.first_token("a", 1.0)
    assert take(admission, 1.0) == []
    admission.first_token("X", 1.0)
    assert take(admission, 1.0) == ["Z"]


def test_a_batch_prompt_longer_than_that_goes_alone() -> None:
    admission = queue(limit=100)
    offer(admission, "X", BATCH, tokens=10 * BUDGET)
    offer(admission, "Y", BATCH)
    assert take(admission, 0.0) == ["X"]
    admission.remove("X")
    assert take(admission, 0.0) == ["Y"]


def test_a_batch_prompt_longer_than_the_budget_is_in_the_way_of_others_that_wait() -> None:
    admission = queue(limit=100)
    offer(admission, "X", BATCH, tokens=BUDGET + 1)
    assert take(admission, 0.0) == ["X"]
    assert admission.oversized_batch() == []
    offer(admission, "Y", BATCH)
    assert admission.oversized_batch() == []
    offer(admission, "a")
    assert admission.oversized_batch() == ["X"]
    admission.put_back("m", "X", BATCH, BUDGET + 1, since_s=0.0, now_s=1.0, refusal=None)
    assert admission.oversized_batch() == []
    assert take(admission, 1.0) == ["a", "X"], "first of its tier only"


# ---- predictions


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    admission = queue(limit=100)
    offer(admission, "abcdefgh", URGENT, tokens=1_000_000)
    assert admission.rates() == {}
    assert len(admission) == 8


def test_pace_is_measured_while_requests_wait() -> None:
    assert paced(queue(limit=100)).rates() == {"m": pytest.approx(100, rel=0.01)}


def test_what_would_come_too_late_is_refused_with_the_time_until_it_fits() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "a", URGENT, tokens=50, now_s=4.0)
    offer(admission, "b", URGENT, tokens=100, now_s=4.0)  # 1.5 s at 100 tokens/s
    with pytest.raises(OverloadedError) as caught:
        admission.offer("m", "c", URGENT, 50, 4.0)  # 2 s
    assert caught.value.retry_after_s == pytest.approx(2.0 - SLO_SHARE * 2.0, rel=0.05)
    assert "class 'urgent'" in caught.value.message
    assert admission.refusals == {("urgent", Refusal.SLO): 1}
    assert admission.offer("m", "d", TERMS, 50, 4.0) == [], "its class promises nothing"


def test_what_is_being_prefilled_counts_as_before_a_newcomer() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "a", tokens=100, now_s=4.0)
    assert take(admission, 4.0) == ["a"]
    offer(admission, "b", URGENT, tokens=50, now_s=4.0)
    with pytest.raises(OverloadedError):
        admission.offer("m", "c", URGENT, 50, 4.0)


def test_the_first_in_line_is_never_refused_for_the_pace() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "a", tokens=10_000, now_s=4.0)
    assert take(admission, 4.0) == ["a"]
    offer(admission, "b", URGENT, tokens=10_000, now_s=4.0)


def test_a_tenants_flood_does_not_count_against_another_tenant() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "abc", RequestTerms("urgent", "flood"), tokens=50, now_s=4.0)
    with pytest.raises(OverloadedError):
        admission.offer("m", "d", RequestTerms("urgent", "flood"), 50, 4.0)
    offer(admission, "X", RequestTerms("urgent", "other"), tokens=50, now_s=4.0)


def test_batch_that_waits_does_not_count_against_others() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "XYZ", BATCH, tokens=10_000, now_s=4.0)
    offer(admission, "a", URGENT, tokens=50, now_s=4.0)


def test_the_time_in_which_workers_refuse_counts() -> None:
    admission = paced(queue(limit=100, timeout_s=1000.0))
    offer(admission, "a", now_s=4.0)
    admission.put_back("m", "b", TERMS, 1, since_s=4.0, now_s=4.0, refusal=KvExhausted("no blocks"))
    take(admission, 4.0)
    admission.dispatch(8.0, lambda _: False, one_worker)
    assert admission.rates()["m"] < 70


def test_a_pause_without_workers_is_no_pace() -> None:
    admission = paced(queue(limit=100, timeout_s=1000.0))
    offer(admission, "a", now_s=4.0)
    admission.dispatch(4.5, lambda _: False, lambda _: 0)
    admission.dispatch(500.0, lambda _: False, lambda _: 0)
    assert admission.rates() == {"m": pytest.approx(100, rel=0.01)}


# ---- deadlines


def test_a_request_whose_deadline_passed_is_not_queued() -> None:
    admission = queue()
    with pytest.raises(DeadlineExceeded):
        admission.offer("m", "a", RequestTerms("interactive", deadline_s=3.0), 1, 3.0)
    assert admission.refusals == {("interactive", Refusal.DEADLINE): 1}


def test_a_deadline_shorter_than_the_prediction_is_refused_at_once() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "a", tokens=100, now_s=4.0)
    offer(admission, "b", RequestTerms("interactive", deadline_s=6.1), tokens=100, now_s=4.0)
    with pytest.raises(OverloadedError) as caught:
        admission.offer("m", "c", RequestTerms("interactive", deadline_s=6.5), 100, 4.0)
    assert caught.value.retry_after_s == pytest.approx(0.5, abs=0.05)
    assert "deadline" in caught.value.message


def test_a_queued_request_is_dropped_once_its_deadline_cannot_be_met() -> None:
    admission = paced(queue(limit=100))
    offer(admission, "a", RequestTerms("interactive", deadline_s=8.0), tokens=200, now_s=4.0)
    assert admission.next_due_s(4.0) == pytest.approx(6.0, abs=0.05)
    [(item, error)] = admission.expire(6.05)
    assert item == "a"
    assert isinstance(error, DeadlineExceeded)


def test_without_a_pace_it_waits_for_the_deadline_itself() -> None:
    admission = queue()
    offer(admission, "a", RequestTerms("interactive", deadline_s=8.0), tokens=200)
    assert admission.expire(7.9) == []
    assert [item for item, _ in admission.expire(8.0)] == ["a"]
