import pytest

from router.admission import REFUSED_HOLD_S, Admission
from tandem.errors import KvExhausted, NoWorker, OverloadedError


def queue(limit: int = 3, timeout_s: float = 10.0) -> Admission[str]:
    return Admission(max_queued_requests=limit, queue_timeout_s=timeout_s)


def take(admission: Admission[str], now_s: float, room: int = 100) -> list[str]:
    taken: list[str] = []

    def place(item: str) -> bool:
        if len(taken) == room:
            return False
        taken.append(item)
        return True

    admission.dispatch(now_s, place)
    return taken


def test_first_come_first_served_as_far_as_there_is_room() -> None:
    admission = queue()
    for item in "abc":
        admission.offer("m", item, 0.0)
    assert take(admission, 1.0, room=2) == ["a", "b"]
    assert take(admission, 1.0) == ["c"]
    assert len(admission) == 0


def test_full_queue_refuses_with_a_retry_delay() -> None:
    admission = queue(limit=1)
    admission.offer("m", "a", 0.0)
    with pytest.raises(OverloadedError) as caught:
        admission.offer("m", "b", 4.0)
    assert caught.value.retry_after_s == 4.0


def test_one_model_without_room_does_not_hold_up_another() -> None:
    admission = queue()
    admission.offer("m", "a", 0.0)
    admission.offer("n", "b", 0.0)
    taken: list[str] = []
    admission.dispatch(0.0, lambda item: item == "b" and not taken.append(item))
    assert taken == ["b"]
    assert admission.queued("m") == 1


def test_wait_without_any_worker_ends_with_no_worker() -> None:
    admission = queue(timeout_s=10.0)
    admission.worker_seen("m", 0.5)
    admission.offer("m", "a", 1.0)
    assert admission.next_due_s(1.0) == 11.0
    assert admission.expire(10.9) == []
    [(item, error)] = admission.expire(11.0)
    assert item == "a"
    assert isinstance(error, NoWorker)
    assert error.wire.retryable


def test_wait_beside_busy_workers_ends_with_overloaded() -> None:
    admission = queue(timeout_s=10.0)
    admission.offer("m", "a", 1.0)
    admission.worker_seen("m", 5.0)
    [(_, error)] = admission.expire(11.0)
    assert isinstance(error, OverloadedError)


def test_refused_request_waits_first_in_line_and_keeps_its_deadline() -> None:
    admission = queue(timeout_s=10.0)
    admission.offer("m", "b", 1.0)
    admission.put_back("m", "a", since_s=0.0, now_s=2.0, refusal=KvExhausted("no blocks"))
    assert take(admission, 2.0) == []
    assert admission.next_due_s(2.0) == pytest.approx(2.0 + REFUSED_HOLD_S)
    admission.worker_seen("m", 2.0)
    [(item, error)] = admission.expire(10.0)
    assert item == "a"
    assert isinstance(error, KvExhausted)
    assert take(admission, 10.0) == ["b"]


def test_put_back_comes_before_the_others_after_its_hold() -> None:
    admission = queue()
    admission.offer("m", "b", 0.0)
    admission.put_back("m", "a", since_s=0.0, now_s=0.0, refusal=KvExhausted("no blocks"))
    assert take(admission, REFUSED_HOLD_S) == ["a", "b"]


def test_withdrawn_request_is_not_dispatched() -> None:
    admission = queue()
    admission.offer("m", "a", 0.0)
    assert admission.withdraw("m", admission.items()[0])
    assert not admission.withdraw("m", "a")
    assert take(admission, 0.0) == []
    assert admission.next_due_s(0.0) is None
