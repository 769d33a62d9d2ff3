"""Requests of a worker by router session: frames go where they belong, and every request ends once."""

import pytest

from kvtransfer.causes import HandoffCause, HandoffFault
from tandem.engine.api import EngineLoad, StepResult, TokenOut
from tandem.errors import InputError, KvExhausted, RequestCancelled
from tandem.kvcache.block_pool import BlockCounts
from tandem.request import FinishReason, RequestState
from tandem.testing.models import FakeClock
from tandem.v1 import inference_pb2, worker_pb2
from worker.requests import Outbox, RequestBook, report_step

LOAD = EngineLoad(0, 0, 0, BlockCounts(8, 0, 0, 0, 8))


class Sent:
    """Collects what was flushed, parsed again, by session."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, worker_pb2.WorkerFrame]] = []

    def __call__(self, session: int, frame: bytes) -> None:
        self.frames.append((session, worker_pb2.WorkerFrame.FromString(frame)))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def book(sent: Sent) -> RequestBook:
    book = RequestBook(Outbox(sent))
    book.sessions = {1: "router-a", 2: "router-b"}
    return book


def flush(book: RequestBook) -> None:
    book.outbox.flush(LOAD, 7, frozenset(), book.sessions, book.busy_sessions)


def test_one_frame_per_session_holds_everything_of_a_step(book: RequestBook, sent: Sent) -> None:
    flush(book)
    sent.frames.clear()
    one, two = book.open(1, "x"), book.open(2, "x")
    book.finish(one, FinishReason.STOP)
    book.fail(two, KvExhausted("no room"))
    flush(book)
    frames = dict(sent.frames)
    assert len(sent.frames) == 2
    assert frames[1].ended[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert frames[2].ended[0].error.code == "kv_exhausted"


def test_the_load_goes_to_every_session_only_when_it_changed(book: RequestBook, sent: Sent) -> None:
    flush(book)
    assert {session for session, frame in sent.frames if frame.HasField("load")} == {1, 2}
    sent.frames.clear()
    flush(book)
    assert sent.frames == []


def test_two_live_requests_of_one_session_cannot_share_an_id(book: RequestBook) -> None:
    first = book.open(1, "x")
    with pytest.raises(InputError, match="request_id"):
        book.open(1, "x")
    book.finish(first, FinishReason.LENGTH)
    assert book.open(1, "x") != first


def test_a_request_ends_once_and_is_counted_once(book: RequestBook) -> None:
    engine_id = book.open(1, "x")
    book.fail(engine_id, RequestCancelled("gone"))
    book.finish(engine_id, FinishReason.STOP)
    assert book.ends == {RequestState.CANCELLED: 1}


def test_a_closed_session_hears_nothing_more(book: RequestBook, sent: Sent) -> None:
    flush(book)
    sent.frames.clear()
    engine_id = book.open(1, "x")
    del book.sessions[1]
    book.finish(engine_id, FinishReason.STOP)
    flush(book)
    assert sent.frames == []


def test_a_failed_handoff_is_counted_by_its_cause_once_and_names_it(book: RequestBook, sent: Sent) -> None:
    engine_id = book.open(1, "x")
    for _ in range(2):
        book.fail(engine_id, HandoffFault(HandoffCause.DIGEST_MISMATCH, "piece 3 arrived corrupted"))
    book.fail(book.open(1, "y"), KvExhausted("no room"))
    flush(book)
    errors = [ended.error for ended in dict(sent.frames)[1].ended]
    assert [error.cause for error in errors] == ["digest_mismatch", ""]
    assert not errors[1].HasField("cause")
    assert book.handoff_failures == {HandoffCause.DIGEST_MISMATCH: 1}


def test_every_frame_tells_when_it_left(sent: Sent) -> None:
    clock = FakeClock(41.0)
    book = RequestBook(Outbox(sent, clock))
    book.sessions = {1: "router-a"}
    clock.advance(1)
    flush(book)
    assert [frame.sent_at_s for _, frame in sent.frames] == [42.0]


def test_a_long_step_is_told_each_second_to_routers_with_requests(sent: Sent) -> None:
    clock = FakeClock(41.0)
    book = RequestBook(Outbox(sent, clock))
    book.sessions = {1: "router-a", 2: "router-b"}
    book.open(2, "x")
    flush(book)
    sent.frames.clear()
    told = []
    for _ in range(10):
        clock.advance(0.4)
        told.append(book.outbox.report_computing(book.busy_sessions))
    assert told == [False, False, True] * 3 + [False]
    assert [(session, frame.computing) for session, frame in sent.frames] == 3 * [(2, True)]


def test_a_router_is_told_which_of_its_frames_the_report_knows_of(book: RequestBook, sent: Sent) -> None:
    flush(book)
    assert {frame.frames_seen for _, frame in sent.frames} == {0}
    sent.frames.clear()
    for _ in range(3):
        book.outbox.count_frame(1)
    flush(book)  # the load is what it was; that it is so after three frames more is news
    assert [(session, frame.frames_seen) for session, frame in sent.frames] == [(1, 3)]
    book.outbox.drop(1)
    book.outbox.frame(1)
    flush(book)
    assert sent.frames[-1][1].frames_seen == 0, "another session counts anew"


def test_the_load_is_told_again_every_second_where_a_request_is_live(sent: Sent) -> None:
    clock = FakeClock(0.0)
    book = RequestBook(Outbox(sent, clock))
    book.sessions = {1: "router-a", 2: "router-b"}
    engine_id = book.open(1, "x")
    for _ in range(21):  # 5 s
        flush(book)
        clock.advance(0.25)
    loads = [(session, frame.load.steps) for session, frame in sent.frames if frame.HasField("load")]
    assert loads == [(1, 7), (2, 7), *[(1, 7)] * 5]
    book.finish(engine_id, FinishReason.STOP)
    flush(book)
    sent.frames.clear()
    clock.advance(60)
    flush(book)
    assert sent.frames == []


def test_a_first_token_tells_when_its_prompt_was_begun_and_when_it_was_sampled(book: RequestBook, sent: Sent) -> None:
    engine_id = book.open(1, "x")
    report_step(StepResult(began=(engine_id, "0:gone")), book, 10.0, 10.5)  # the prompt takes two steps
    report_step(StepResult(tokens=(TokenOut(engine_id, 7, cached_tokens=0),)), book, 10.5, 11.0)
    report_step(StepResult(tokens=(TokenOut(engine_id, 8),)), book, 11.0, 11.2)
    flush(book)
    first, second = dict(sent.frames)[1].tokens
    assert (first.computing_at_s, first.sampled_at_s) == (10.0, 11.0)
    assert not second.HasField("computing_at_s")
    assert not second.HasField("sampled_at_s")
    book.close(engine_id, RequestState.FINISHED)
    assert book.computing_since_s(engine_id) is None
    assert book.computing_since_s("0:gone") is None


def test_a_request_that_is_cancelled_before_it_begins_counts_as_cancelled(book: RequestBook) -> None:
    book.refuse(1, "waits for its images", RequestCancelled("its router left"))
    book.refuse(1, "is wrong", InputError("no"))
    assert book.ends == {RequestState.CANCELLED: 1, RequestState.REJECTED: 1}
