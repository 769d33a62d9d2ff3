"""What a trace makes of the router's times and the workers' reports."""

from __future__ import annotations

import pytest

from kvtransfer.causes import HandoffCause, HandoffFault
from router.observe.trace import Stage, Trace
from router.observe.trace_store import TraceStore
from router.requests.output import Usage
from router.workers.clock_offset import DRIFT, ClockOffset
from tandem.errors import ErrorCode, KvExhausted, NotFound
from tandem.request import RequestState
from tandem.v1 import trace_pb2, worker_pb2


def received(wire_id: str = "r.1") -> worker_pb2.HandoffDone:
    stages = worker_pb2.ReceiveStages(
        reserved_s=0.001, linked_s=0.01, first_piece_s=0.02, last_piece_s=0.05, verified_s=0.06, first_token_s=0.055,
        joined_s=0.061,
    )  # fmt: skip
    return worker_pb2.HandoffDone(request_id=wire_id, bytes=4096, blocks=4, pieces=3, received=stages)


def sent(wire_id: str = "r.1") -> worker_pb2.HandoffDone:
    stages = worker_pb2.SendStages(
        opened_s=0.001, computing_s=0.002, linked_s=0.003, first_piece_s=0.01, last_layer_s=0.04, last_ack_s=0.045,
        first_token_s=0.044, hidden_bytes=3072,
    )  # fmt: skip
    return worker_pb2.HandoffDone(request_id=wire_id, bytes=4096, pieces=3, sent=stages)


def handed_off() -> Trace:
    """Received at 100 s; dispatched 10 ms later; Prefill goes out at 100.015 s."""
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.01)
    attempt = trace.attempts[0]
    attempt.reserved_s = attempt.prefill_sent_s = 100.015
    attempt.computing_s, attempt.sampled_s = 100.018, 100.06
    attempt.first_token_s = 100.062
    trace.report(received(), 100.012)
    trace.report(sent(), 100.016)
    attempt.joined_s = 100.073
    trace.end(RequestState.FINISHED, None, Usage(64, 8, 0), 100.2)
    return trace


def spans(attempt: trace_pb2.Attempt) -> dict[str, tuple[float, float]]:
    """In milliseconds."""
    return {span.stage: (round(1000 * span.start_s, 3), round(1000 * span.end_s, 3)) for span in attempt.spans}


def test_both_sides_lie_on_the_routers_clock() -> None:
    wire = handed_off().to_wire()
    (attempt,) = wire.attempts
    assert spans(attempt) == {
        "queue": (0, 10),
        "reserve": (10, 15),
        "dispatch": (15, 18),
        "connect": (17, 19),
        "prefill": (18, 60),
        "pieces": (32, 62),
        "first_token": (60, 62),
        "verify": (62, 72),
        "join": (72, 73),
        "decode": (73, 200),
    }
    assert [span.start_s for span in attempt.spans] == sorted(span.start_s for span in attempt.spans)
    assert (attempt.bytes, attempt.blocks, attempt.pieces) == (4096, 4, 3)
    assert attempt.overlap_share == 0.75
    assert attempt.exposed_s == pytest.approx(0.073 - 0.056)
    assert [wire.first_token_s, wire.total_s] == pytest.approx([0.062, 0.2])


def test_a_report_is_never_laid_before_what_it_answers() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.01)
    trace.attempts[0].prefill_sent_s = 100.015
    for done in (received(), sent()):
        trace.report(done, 1.0)
    attempt = trace.attempts[0]
    assert attempt.received is not None
    assert attempt.sent is not None
    assert (attempt.received.anchor_s, attempt.sent.anchor_s) == (100.01, 100.015)


def test_without_a_handoff_there_is_queue_prefill_and_decode() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "", "decode-0", 100.01)
    trace.attempts[0].first_token_s = 100.05
    trace.end(RequestState.FINISHED, None, None, 100.2)
    (attempt,) = trace.to_wire().attempts
    assert spans(attempt) == {
        "queue": (0, 10), "prefill": (10, 50), "first_token": (50, 50), "decode": (50, 200),
    }  # fmt: skip
    assert not attempt.HasField("exposed_s")
    assert not attempt.HasField("overlap_share")


def test_the_line_in_the_worker_has_a_name_without_a_handoff_too() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "", "decode-0", 100.01)
    attempt = trace.attempts[0]
    attempt.computing_s, attempt.sampled_s, attempt.first_token_s = 100.5, 100.6, 100.61
    (wire,) = trace.to_wire().attempts
    assert spans(wire) == {
        "queue": (0, 10), "dispatch": (10, 500), "prefill": (500, 600), "first_token": (600, 610),
    }  # fmt: skip


def test_a_failed_attempt_is_part_of_the_time_to_first_token() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.01)
    trace.failed(HandoffFault(HandoffCause.PEER_LOST, "gone"), 100.3)
    trace.begin("r.2", "", "decode-1", 100.35)
    trace.attempts[-1].first_token_s = 100.5
    found = [(span.stage, round(1000 * span.duration_s)) for span in trace.to_first_token()]
    assert found == [
        (Stage.QUEUE, 10), (Stage.RETRY, 290), (Stage.QUEUE, 50), (Stage.PREFILL, 150), (Stage.FIRST_TOKEN, 0),
    ]  # fmt: skip
    assert sum(each.duration_s for each in trace.to_first_token()) == pytest.approx(0.5)


def test_a_prompt_that_the_decode_worker_had_whole_joins_when_its_first_token_comes() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.0)
    stages = worker_pb2.ReceiveStages(reserved_s=0.001, first_token_s=0.05, joined_s=0.052)
    trace.report(worker_pb2.HandoffDone(request_id="r.1", received=stages), 100.0)
    (attempt,) = trace.to_wire().attempts
    assert spans(attempt)[Stage.JOIN] == (50, 52)
    assert Stage.PIECES not in spans(attempt)


def test_every_attempt_is_kept_with_its_cause_and_waits_since_the_one_before() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.01)
    trace.failed(KvExhausted("no room"), 100.02)
    trace.begin("r.1", "prefill-0", "decode-1", 100.02)
    trace.failed(HandoffFault(HandoffCause.DIGEST_MISMATCH, "corrupted"), 100.05)
    trace.failed(KvExhausted("afterwards"), 100.06)
    trace.begin("r.2", "prefill-1", "decode-1", 100.09)
    trace.end(RequestState.CANCELLED, ErrorCode.CANCELLED, None, 100.1)
    first, second, third = trace.to_wire().attempts
    assert (first.error, first.cause) == ("kv_exhausted", "")
    assert (second.error, second.cause, second.message) == ("handoff_failed", "digest_mismatch", "corrupted")
    assert (third.error, spans(third)["queue"]) == ("", (50, 90))


def test_the_first_token_is_the_one_the_client_waited_for() -> None:
    trace = Trace("r", "m", 64, 100.0)
    for number, first_token_s in enumerate((100.05, 100.25), 1):
        trace.begin(f"r.{number}", "prefill-0", "decode-0", first_token_s - 0.04)
        trace.attempts[-1].first_token_s = first_token_s
        if number == 1:
            trace.failed(KvExhausted("lost in mid-answer"), 100.2)
    trace.end(RequestState.FINISHED, None, None, 100.4)
    assert trace.to_wire().first_token_s == pytest.approx(0.05)


def test_a_late_report_still_finds_its_attempt_and_a_strange_one_does_not() -> None:
    trace = Trace("r", "m", 64, 100.0)
    trace.begin("r.1", "prefill-0", "decode-0", 100.01)
    trace.end(RequestState.FINISHED, None, None, 100.1)
    assert trace.report(sent(), 100.02) is trace.attempts[0]
    assert trace.report(sent("x.1"), 100.02) is None


def ended(request_id: str, state: RequestState = RequestState.FINISHED, *, placed: bool = True) -> Trace:
    trace = Trace(request_id, "m", 1, 0.0)
    if placed:
        trace.begin(f"{request_id}.1", "", "decode-0", 0.0)
    trace.end(state, None, None, 1.0)
    return trace


def test_the_store_keeps_the_latest_and_no_more() -> None:
    store = TraceStore(limit=3)
    for number in range(5):
        store.add(ended(str(number)))
    assert [trace.request_id for trace in store.latest(0)] == ["4", "3", "2"]
    assert [trace.request_id for trace in store.latest(1)] == ["4"]
    assert store.get("4").request_id == store.get("chatcmpl-4").request_id == store.get("cmpl-4").request_id == "4"
    with pytest.raises(NotFound, match="tandem trace"):
        store.get("0")


def test_what_clients_call_their_requests_is_kept_as_long_as_the_traces_and_hides_no_other() -> None:
    store = TraceStore(limit=3)

    def add(request_id: str, client_id: str) -> None:
        trace = ended(request_id)
        trace.client_id = client_id
        store.add(trace)

    add("a", "mine")
    add("b", "a")  # whoever names another's id does not get in its way
    add("c", "mine")
    assert store.get("a").request_id == "a"
    assert store.get("mine").request_id == "c"
    for number in range(3):
        add(str(number), "again")
    assert store.get("again").request_id == "2"
    with pytest.raises(NotFound):
        store.get("mine")
    assert len(store._by_client) == 1


def test_a_flood_of_refusals_pushes_nothing_out() -> None:
    store = TraceStore(limit=1)
    store.add(ended("a"))
    store.add(ended("b", RequestState.REJECTED, placed=False))
    assert store.get("a").request_id == "a"
    store.add(ended("c", RequestState.REJECTED))  # it had been on workers before its time in the queue was over
    assert store.get("c").request_id == "c"


def test_the_quickest_frame_lays_a_workers_clock_on_ours() -> None:
    offset = ClockOffset()
    assert offset.local_s(5.0) is None
    for sent_at_s, travel_s in ((1000.0, 0.004), (1000.1, 0.001), (1000.2, 0.009)):
        offset.add_sample(sent_at_s, sent_at_s - 700 + travel_s)
    assert offset.local_s(1000.0) == pytest.approx(300.001, abs=2 * DRIFT)


def test_clocks_that_run_apart_are_followed() -> None:
    offset = ClockOffset()
    for second in range(3600):
        offset.add_sample(1000 + second, 300 + second * (1 + DRIFT / 2))
    assert offset.local_s(1000 + 3599) == pytest.approx(300 + 3599 * (1 + DRIFT / 2), abs=2 * DRIFT)
