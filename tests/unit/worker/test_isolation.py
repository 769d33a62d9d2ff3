"""What fails for one request in a worker ends that request; the worker and the other requests go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvtransfer.control import FromAgent, SendClosed
from tandem.engine.api import PromptScores, RequestEnd, ScoredToken, StepResult, TokenOut
from tandem.errors import RequestFailed, TandemError, WorkerLost
from tandem.v1 import worker_pb2
from worker import requests as requests_module
from worker.requests import Outbox, RequestBook, report_step
from worker.roles import RoleSet

SESSION = 7


@dataclass
class Role:
    """Owns the requests of its handoffs. `fails`: the methods that raise."""

    tickets: dict[str, str] = field(default_factory=dict)
    fails: dict[str, Exception] = field(default_factory=dict)
    cancelled: dict[str, TandemError] = field(default_factory=dict)
    ended: list[RequestEnd] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if (error := self.fails.get(name)) is not None:
            raise error

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        self._called("on_frame")

    def owns(self, engine_id: str) -> bool:
        return engine_id in self.tickets.values()

    def request_of(self, ticket_id: str) -> str | None:
        return self.tickets.get(ticket_id)

    def cancel(self, engine_id: str, error: TandemError) -> None:
        self.cancelled[engine_id] = error
        self._called("cancel")

    def on_agent(self, rank: int, message: FromAgent) -> None:
        self._called("on_agent")

    def on_agent_lost(self, rank: int) -> None:
        self._called("on_agent_lost")

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        self._called("after_step")
        self.ended += ended

    def tick(self) -> None:
        self._called("tick")


class Worker:
    """Two roles: the second owns what the first does not."""

    def __init__(self) -> None:
        self.book = RequestBook(Outbox(lambda session, raw: None))
        self.book.sessions[SESSION] = "router-0"
        self.first, self.second = Role(), Role()
        self.roles = RoleSet(self.book, (self.first, self.second), {})

    def open(self, name: str, ticket_id: str | None = None) -> str:
        engine_id = self.book.open(SESSION, name)
        if ticket_id is not None:
            self.first.tickets[ticket_id] = engine_id
        return engine_id

    @property
    def frame(self) -> worker_pb2.WorkerFrame:
        return self.book.outbox.frame(SESSION)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_an_agents_message_that_cannot_be_handled_ends_the_request_of_its_handoff_only(worker: Worker) -> None:
    engine_id = worker.open("a", "t1")
    worker.open("b", "t2")
    worker.first.fails["on_agent"] = KeyError("rank 3")
    worker.roles.on_agent(0, SendClosed(ticket_id="t1"))
    assert worker.first.cancelled.keys() == {engine_id}
    assert isinstance(worker.first.cancelled[engine_id], RequestFailed)
    assert worker.second.calls == ["on_agent"], "the other role gets the message all the same"
    worker.roles.on_agent(0, SendClosed(ticket_id="unknown"))
    assert len(worker.first.cancelled) == 1


def test_a_request_that_cannot_even_be_ended_is_reported_to_its_router(worker: Worker) -> None:
    worker.open("a", "t1")
    worker.first.fails = {"on_agent": KeyError("rank 3"), "cancel": AttributeError("entry")}
    worker.roles.on_agent(0, SendClosed(ticket_id="t1"))
    assert [(each.request_id, each.error.code) for each in worker.frame.ended] == [("a", "request_failed")]


@pytest.mark.parametrize("call", ["tick", "on_agent_lost"])
def test_a_role_that_fails_does_not_keep_the_others_from_theirs(worker: Worker, call: str) -> None:
    worker.first.fails[call] = TypeError("None")
    worker.roles.tick() if call == "tick" else worker.roles.on_agent_lost(0)
    assert worker.second.calls == [call]


def test_what_is_no_bug_of_the_hosts_code_still_ends_the_worker(worker: Worker) -> None:
    worker.first.fails["on_agent"] = WorkerLost("a follower is gone")
    with pytest.raises(WorkerLost):
        worker.roles.on_agent(0, SendClosed(ticket_id="t"))


def test_an_end_that_cannot_be_handled_ends_that_request_and_the_others_end_as_they_should(worker: Worker) -> None:
    failing, fine = worker.open("a", "t1"), worker.open("b")
    worker.first.fails["after_step"] = IndexError("empty")
    worker.roles.after_step([RequestEnd(failing), RequestEnd(fine)], {})
    assert worker.first.cancelled.keys() == {failing}
    assert worker.second.ended == [RequestEnd(fine)]


@pytest.mark.parametrize("has_ended", [True, False])
def test_output_that_cannot_be_reported_ends_its_request(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    bad, good = worker.open("bad"), worker.open("good")
    tokens = (TokenOut(bad, 2**40), TokenOut(good, 5), TokenOut(good, 6))  # no such token id fits the frame
    ended = (RequestEnd(bad),) if has_ended else ()
    failed = report_step(StepResult(tokens=tokens, ended=ended), worker.book, 0.0, 1.0)
    assert [(each.request_id, each.token_id) for each in worker.frame.tokens] == [("good", 5), ("good", 6)]
    assert failed.keys() == {bad}
    worker.roles.after_step(ended, failed)
    errors = worker.second.cancelled if not has_ended else {each.request_id: each.error for each in worker.second.ended}
    assert errors.keys() == {bad}
    assert isinstance(errors[bad], RequestFailed)


def test_scores_that_cannot_be_reported_end_their_request_before_its_token(worker: Worker) -> None:
    bad = worker.open("bad")
    scores = PromptScores(bad, 1, (ScoredToken(-1, 0.0, ()),))
    result = StepResult(tokens=(TokenOut(bad, 5),), prompt_scores=(scores,))
    assert report_step(result, worker.book, 0.0, 1.0).keys() == {bad}
    assert not worker.frame.tokens


def test_the_bugs_that_are_held_are_those_of_the_hosts_code() -> None:
    """A GPU's error is a RuntimeError, or of a class of its own: after it the process cannot go on."""
    assert not issubclass(RuntimeError, requests_module.BUGS)
    assert not any(issubclass(TandemError, each) for each in requests_module.BUGS)
