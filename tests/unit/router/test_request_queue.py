from collections.abc import Sequence

import pytest

from router.admission.request_queue import LONGEST_RETRY_S, REFUSED_HOLD_S, SLO_SHARE, Refusal, RequestQueue
from router.request_terms import RequestTerms
from tandem.config.router import ClassSpec
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


def make_queue(limit: int = 3, timeout_s: float = 10.0, classes: Sequence[ClassSpec] = CLASSES) -> RequestQueue[str]:
    return RequestQueue(classes, max_queued_requests=limit, queue_timeout_s=timeout_s, budget_tokens=BUDGET)


def take(queue: RequestQueue[str], now_s: float, room: int = 100) -> list[str]:
    taken: list[str] = []

    def place(item: str) -> bool:
        if len(taken) == room:
            return False
        taken.append(item)
        return True

    queue.dispatch(now_s, place, one_worker)
    return taken


def one_worker(model: str) -> int:
    return 1


def offer(
    queue: RequestQueue[str], items: str, terms: RequestTerms = TERMS, *, tokens: int = 100, now_s: float = 0.0
) -> None:
    for item in items:
        assert queue.offer("m", item, terms, tokens, now_s) == []


def paced(queue: RequestQueue[str], tokens_per_s: int = 100) -> RequestQueue[str]:
    """A pool that was seen to prefill at this pace, and is idle at 4 s."""
    for second in range(4):
        queue.offer("m", f"first{second}", TERMS, tokens_per_s, 0.0)
    queue.offer("m", "rest", TERMS, tokens_per_s, 0.0)
    for second in range(4):
        take(queue, float(second), room=1)
        queue.first_token(f"first{second}", second + 0.999_999)
    assert take(queue, 4.0) == ["rest"]
    queue.remove("rest")
    return queue


# ---- the line


def test_first_come_first_served_as_far_as_there_is_room() -> None:
    queue = make_queue()
    offer(queue, "abc")
    assert take(queue, 1.0, room=2) == ["a", "b"]
    assert take(queue, 1.0) == ["c"]
    assert len(queue) == 0


def test_full_queue_refuses_with_a_retry_delay() -> None:
    queue = make_queue(limit=1)
    offer(queue, "a")
    with pytest.raises(OverloadedError) as caught:
        queue.offer("m", "b", TERMS, 1, 4.0)
    assert caught.value.retry_after_s == 4.0
    assert queue.refusals == {("interactive", Refusal.QUEUE_FULL): 1}


def test_one_model_without_room_does_not_hold_up_another() -> None:
    queue = make_queue()
    queue.offer("m", "a", TERMS, 1, 0.0)
    queue.offer("n", "b", TERMS, 1, 0.0)
    taken: list[str] = []

    def take(item: str) -> bool:
        if item == "b":
            taken.append(item)
        return item == "b"

    queue.dispatch(0.0, take, one_worker)
    assert taken == ["b"]
    assert queue.items() == ["a"]


def test_wait_without_any_worker_ends_with_no_worker() -> None:
    queue = make_queue(timeout_s=10.0)
    offer(queue, "a", now_s=1.0)
    queue.dispatch(1.5, lambda _: False, lambda _: 0)
    assert queue.next_due_s(1.0) == 11.0
    assert queue.expire(10.9) == []
    [(item, error)] = queue.expire(11.0)
    assert item == "a"
    assert isinstance(error, NoWorker)
    assert error.wire.retryable


def test_wait_beside_busy_workers_ends_with_overloaded() -> None:
    queue = make_queue(timeout_s=10.0)
    offer(queue, "a", now_s=1.0)
    assert take(queue, 5.0, room=0) == []
    [(_, error)] = queue.expire(11.0)
    assert isinstance(error, OverloadedError)
    assert queue.next_due_s(11.0) is None


def test_a_class_may_wait_longer_than_others() -> None:
    queue = make_queue(timeout_s=10.0)
    offer(queue, "a", BATCH)
    assert queue.expire(99.0) == []
    assert [item for item, _ in queue.expire(100.0)] == ["a"]


def test_refused_request_waits_first_in_line_and_keeps_its_wait() -> None:
    queue = make_queue(timeout_s=10.0)
    offer(queue, "b", now_s=1.0)
    refusal = KvExhausted("no blocks")
    queue.put_back("m", "a", TERMS, 100, since_s=0.0, now_s=2.0, refusal=refusal)
    assert take(queue, 2.0) == []
    assert queue.next_due_s(2.0) == pytest.approx(2.0 + REFUSED_HOLD_S)
    [(item, error)] = queue.expire(10.0)
    assert item == "a"
    assert isinstance(error, KvExhausted)
    assert take(queue, 10.0) == ["b"]


def test_put_back_comes_before_the_others_after_its_hold() -> None:
    queue = make_queue()
    offer(queue, "b")
    queue.put_back("m", "a", TERMS, 100, since_s=0.0, now_s=0.0, refusal=KvExhausted("no blocks"))
    assert take(queue, REFUSED_HOLD_S) == ["a", "b"]


def test_request_that_ended_is_not_dispatched() -> None:
    queue = make_queue()
    offer(queue, "a")
    queue.remove("a")
    queue.remove("a")
    assert take(queue, 0.0) == []
    assert queue.next_due_s(0.0) is None


def test_request_that_ends_while_it_is_placed_leaves_the_others_their_turn() -> None:
    queue = make_queue()
    offer(queue, "ab")
    taken: list[str] = []

    def place(item: str) -> bool:
        if item == "a":
            queue.remove("a")
        else:
            taken.append(item)
        return True

    queue.dispatch(0.0, place, one_worker)
    assert taken == ["b"]
    assert len(queue) == 0


def test_many_requests_leave_nothing_behind() -> None:
    queue = make_queue()
    for number in range(10_000):
        queue.offer("m", f"r{number}", TERMS, 1, 0.0)
        take(queue, 0.0)
        queue.first_token(f"r{number}", 0.0)
    assert len(queue._expiries) < 200
    assert not queue._prefilling


# ---- tenants and classes


def test_tenants_take_turns_by_tokens() -> None:
    queue = make_queue(limit=100)
    offer(queue, "abcdef", RequestTerms("interactive", "many"))
    offer(queue, "XY", RequestTerms("interactive", "few"))
    assert "".join(take(queue, 0.0)) == "aXbYcdef"


def test_classes_share_by_weight_and_tenants_alike_within() -> None:
    classes = (ClassSpec(name="interactive"), ClassSpec(name="urgent", weight=3.0))
    queue = make_queue(limit=100, classes=classes)
    offer(queue, "abcdefgh")
    offer(queue, "ABCD", RequestTerms("urgent", "x"))
    offer(queue, "STUV", RequestTerms("urgent", "y"))
    first = take(queue, 0.0, room=8)
    assert sum(item.isupper() for item in first) == 6
    assert {item for item in first if item.isupper()} == set("ABCSTU")


def test_a_full_queue_gives_a_place_to_who_has_less_in_it() -> None:
    queue = make_queue(limit=4)
    offer(queue, "abcd", RequestTerms("interactive", "many"))
    [(item, error)] = queue.offer("m", "X", RequestTerms("interactive", "few"), 1, 0.0)
    assert item == "d", "the newest of the longest line"
    assert isinstance(error, OverloadedError)
    assert [item for item, _ in queue.offer("m", "Y", RequestTerms("interactive", "few"), 1, 0.0)] == ["c"]
    with pytest.raises(OverloadedError):
        queue.offer("m", "Z", RequestTerms("interactive", "few"), 1, 0.0)
    with pytest.raises(OverloadedError):
        queue.offer("m", "e", RequestTerms("interactive", "many"), 1, 0.0)
    assert "".join(sorted(queue.items())) == "XYab"


def test_a_full_queue_gives_places_of_batch_requests_to_others_only() -> None:
    queue = make_queue(limit=2)
    offer(queue, "ab")
    with pytest.raises(OverloadedError):
        queue.offer("m", "X", BATCH, 1, 0.0)
    queue = make_queue(limit=2)
    offer(queue, "XY", BATCH)
    assert [item for item, _ in queue.offer("m", "a", TERMS, 1, 0.0)] == ["Y"]
    assert [item for item, _ in queue.offer("m", "b", TERMS, 1, 0.0)] == ["X"]


# ---- batch


def test_batch_is_dispatched_only_while_nobody_else_waits() -> None:
    queue = make_queue(limit=100)
    offer(queue, "XY", BATCH)
    offer(queue, "ab")
    assert take(queue, 0.0, room=1) == ["a"]
    assert take(queue, 0.0) == ["b", "X", "Y"]


def test_batch_takes_half_of_the_dispatch_budget_at_most() -> None:
    queue = make_queue(limit=100)
    offer(queue, "XYZ", BATCH)
    offer(queue, "a")
    assert take(queue, 0.0) == ["a", "X", "Y"]
    queue.first_token("a", 1.0)
    assert take(queue, 1.0) == []
    queue.first_token("X", 1.0)
    assert take(queue, 1.0) == ["Z"]


def test_a_batch_prompt_longer_than_that_goes_alone() -> None:
    queue = make_queue(limit=100)
    offer(queue, "X", BATCH, tokens=10 * BUDGET)
    offer(queue, "Y", BATCH)
    assert take(queue, 0.0) == ["X"]
    queue.remove("X")
    assert take(queue, 0.0) == ["Y"]


def test_a_batch_prompt_longer_than_the_budget_is_in_the_way_of_others_that_wait() -> None:
    queue = make_queue(limit=100)
    offer(queue, "X", BATCH, tokens=BUDGET + 1)
    assert take(queue, 0.0) == ["X"]
    assert queue.oversized_batch() == []
    offer(queue, "Y", BATCH)
    assert queue.oversized_batch() == []
    offer(queue, "a")
    assert queue.oversized_batch() == ["X"]
    queue.put_back("m", "X", BATCH, BUDGET + 1, since_s=0.0, now_s=1.0, refusal=None)
    assert queue.oversized_batch() == []
    assert take(queue, 1.0) == ["a", "X"], "first of its tier only"


# ---- predictions


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    queue = make_queue(limit=100)
    offer(queue, "abcdefgh", URGENT, tokens=1_000_000)
    assert queue.rates() == {}
    assert len(queue) == 8


def test_pace_is_measured_while_requests_wait() -> None:
    assert paced(make_queue(limit=100)).rates() == {"m": pytest.approx(100, rel=0.01)}


def test_no_client_is_told_to_come_back_in_hours() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", URGENT, tokens=50, now_s=4.0)
    with pytest.raises(OverloadedError) as caught:
        queue.offer("m", "b", URGENT, 10_000_000, 300.0)  # nothing was prefilled for five minutes
    assert caught.value.retry_after_s == LONGEST_RETRY_S


def test_what_would_come_too_late_is_refused_with_the_time_until_it_fits() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", URGENT, tokens=50, now_s=4.0)
    offer(queue, "b", URGENT, tokens=100, now_s=4.0)  # 1.5 s at 100 tokens/s
    with pytest.raises(OverloadedError) as caught:
        queue.offer("m", "c", URGENT, 50, 4.0)  # 2 s
    assert caught.value.retry_after_s == pytest.approx(2.0 - SLO_SHARE * 2.0, rel=0.05)
    assert "class 'urgent'" in caught.value.message
    assert queue.refusals == {("urgent", Refusal.SLO): 1}
    assert queue.offer("m", "d", TERMS, 50, 4.0) == [], "its class promises nothing"


def test_what_is_being_prefilled_counts_as_before_a_newcomer() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", tokens=100, now_s=4.0)
    assert take(queue, 4.0) == ["a"]
    offer(queue, "b", URGENT, tokens=50, now_s=4.0)
    with pytest.raises(OverloadedError):
        queue.offer("m", "c", URGENT, 50, 4.0)


def test_the_first_in_line_is_never_refused_for_the_pace() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", tokens=10_000, now_s=4.0)
    assert take(queue, 4.0) == ["a"]
    offer(queue, "b", URGENT, tokens=10_000, now_s=4.0)


def test_a_tenants_flood_does_not_count_against_another_tenant() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "abc", RequestTerms("urgent", "flood"), tokens=50, now_s=4.0)
    with pytest.raises(OverloadedError):
        queue.offer("m", "d", RequestTerms("urgent", "flood"), 50, 4.0)
    offer(queue, "X", RequestTerms("urgent", "other"), tokens=50, now_s=4.0)


def test_batch_that_waits_does_not_count_against_others() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "XYZ", BATCH, tokens=10_000, now_s=4.0)
    offer(queue, "a", URGENT, tokens=50, now_s=4.0)


def test_the_time_in_which_workers_refuse_counts() -> None:
    queue = paced(make_queue(limit=100, timeout_s=1000.0))
    offer(queue, "a", now_s=4.0)
    queue.put_back("m", "b", TERMS, 1, since_s=4.0, now_s=4.0, refusal=KvExhausted("no blocks"))
    take(queue, 4.0)
    queue.dispatch(8.0, lambda _: False, one_worker)
    assert queue.rates()["m"] < 70


def test_a_pause_without_workers_is_no_pace() -> None:
    queue = paced(make_queue(limit=100, timeout_s=1000.0))
    offer(queue, "a", now_s=4.0)
    queue.dispatch(4.5, lambda _: False, lambda _: 0)
    queue.dispatch(500.0, lambda _: False, lambda _: 0)
    assert queue.rates() == {"m": pytest.approx(100, rel=0.01)}


# ---- deadlines


def test_a_request_whose_deadline_passed_is_not_queued() -> None:
    queue = make_queue()
    with pytest.raises(DeadlineExceeded):
        queue.offer("m", "a", RequestTerms("interactive", deadline_s=3.0), 1, 3.0)
    assert queue.refusals == {("interactive", Refusal.DEADLINE): 1}


def test_a_deadline_shorter_than_the_prediction_is_refused_at_once() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", tokens=100, now_s=4.0)
    offer(queue, "b", RequestTerms("interactive", deadline_s=6.1), tokens=100, now_s=4.0)
    with pytest.raises(OverloadedError) as caught:
        queue.offer("m", "c", RequestTerms("interactive", deadline_s=6.5), 100, 4.0)
    assert caught.value.retry_after_s == pytest.approx(0.5, abs=0.05)
    assert "deadline" in caught.value.message


def test_a_queued_request_is_dropped_once_its_deadline_cannot_be_met() -> None:
    queue = paced(make_queue(limit=100))
    offer(queue, "a", RequestTerms("interactive", deadline_s=8.0), tokens=200, now_s=4.0)
    assert queue.next_due_s(4.0) == pytest.approx(6.0, abs=0.05)
    [(item, error)] = queue.expire(6.05)
    assert item == "a"
    assert isinstance(error, DeadlineExceeded)


def test_without_a_pace_it_waits_for_the_deadline_itself() -> None:
    queue = make_queue()
    offer(queue, "a", RequestTerms("interactive", deadline_s=8.0), tokens=200)
    assert queue.expire(7.9) == []
    assert [item for item, _ in queue.expire(8.0)] == ["a"]


# ---- who is admitted meets the objective


def test_a_request_waits_no_longer_than_its_objective_leaves_for_the_prefill() -> None:
    """100 tokens at 100 tokens/s: one second of the two of the objective."""
    queue = paced(make_queue(limit=100, timeout_s=60.0))
    offer(queue, "a", URGENT, now_s=10.0)
    assert queue.next_due_s(10.0) == pytest.approx(11.0, abs=0.01)
    assert take(queue, 10.5, room=0) == []
    assert queue.expire(10.9) == []
    ((item, error),) = queue.expire(11.1)
    assert item == "a"
    assert isinstance(error, OverloadedError)
    assert "the TTFT objective of class 'urgent' is missed" in str(error)
    assert error.retry_after_s is not None
    assert queue.refusals["urgent", Refusal.SLO] == 1


def test_without_an_objective_it_waits_for_the_timeout() -> None:
    queue = make_queue(timeout_s=60.0)
    offer(queue, "a")
    assert queue.next_due_s(0.0) == 60.0


def test_an_answer_that_lost_its_worker_is_not_refused_for_its_first_token() -> None:
    queue = make_queue(timeout_s=60.0)
    queue.put_back("m", "begun", URGENT, 100, since_s=0.0, now_s=0.0, refusal=None)
    queue.put_back("m", "refused", URGENT, 100, since_s=0.0, now_s=0.0, refusal=KvExhausted("full"))
    assert [item for item, _ in queue.expire(3.0)] == ["refused"]
    assert [item for item, _ in queue.expire(60.0)] == ["begun"]


def test_all_that_are_dispatched_under_overload_meet_the_objective() -> None:
    """In virtual time: a pool of 100 tokens/s that slows down to a tenth, four times as many requests as it can do."""
    queue = paced(make_queue(limit=1000, timeout_s=60.0))
    arrived: dict[str, float] = {}
    ttfts: list[float] = []
    done_s, running, refused = 10.0, "", 0
    for tick in range(400):
        now_s = 10.0 + tick / 10
        refused += len(queue.expire(now_s))
        if tick % 5 == 0:
            try:
                queue.offer("m", f"r{tick}", URGENT, 50, now_s)
                arrived[f"r{tick}"] = now_s
            except OverloadedError:
                refused += 1
        if running and now_s >= done_s:
            queue.first_token(running, now_s)
            ttfts.append(now_s - arrived[running])
            running = ""
        if not running and (taken := take(queue, now_s, room=1)):
            running, done_s = taken[0], now_s + (0.5 if tick < 200 else 1.5)
    assert len(ttfts) > 20
    assert refused > 10
    late = [ttft_s for ttft_s in ttfts if ttft_s > 2.0 + 1.5]  # a prefill may take longer than those before it
    assert not late
