"""How a router's frames go to a worker: what waits goes in one message, where the worker takes it so, and small frames
before large ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.testing.stub_worker import StubWorker, until
from router.workers.frame_queue import FrameQueue
from router.workers.link import WorkerLink
from tandem.config.model import Role
from tandem.errors import WorkerLost
from tandem.request import SamplingParams
from tandem.v1 import worker_pb2
from worker.wire import sampling_frame

HELLO = 1  # message


class Listener:
    def link_changed(self, link: WorkerLink) -> None: ...

    def load_changed(self, link: WorkerLink) -> None: ...

    def work_began(self, link: WorkerLink) -> None: ...


@asynccontextmanager
async def linked(*, takes_more: bool) -> AsyncIterator[tuple[StubWorker, WorkerLink]]:
    worker = StubWorker("w", Role.DECODE, "tiny")
    worker.behaviour.takes_more = takes_more
    await worker.start()
    link = WorkerLink(worker.info(), "router-0", Listener())
    link.start()
    try:
        await until(lambda: link.ready)
        yield worker, link
    finally:
        await link.close()
        await worker.kill()


@pytest.mark.parametrize(("takes_more", "messages"), [(True, 1), (False, 5)])
async def test_frames_of_one_turn_are_one_message_to_a_worker_that_takes_more(takes_more: bool, messages: int) -> None:
    async with linked(takes_more=takes_more) as (worker, link):
        ids = [f"r{number}" for number in range(5)]
        for each in ids:
            link.cancel(each)
        await until(lambda: len(worker.received) == 5)
        assert worker.frames("cancel") == ids
        assert worker.messages == HELLO + messages
        assert link.sent_frames == 5


async def test_a_join_reaches_the_worker_before_a_long_prompt_that_was_sent_first() -> None:
    async with linked(takes_more=True) as (worker, link):
        work = worker_pb2.Work(request_id="long", prompt=[1] * 2000)
        link.send("long", worker_pb2.RouterFrame(reserve=worker_pb2.Reserve(work=work)))
        link.send("joined", worker_pb2.RouterFrame(join=worker_pb2.Join(request_id="joined", first_token=1)))
        await until(lambda: len(worker.received) == 2)
        assert worker.received == [("join", "joined"), ("reserve", "long")]


async def test_a_request_that_goes_on_although_its_router_has_left_it_is_cancelled() -> None:
    """Its move succeeded, but its source has not heard so."""
    async with linked(takes_more=True) as (worker, link):
        held = [worker_pb2.Held(request_id="moving", held=True), worker_pb2.Held(request_id="r", held=False)]
        link._deliver(worker_pb2.WorkerFrame(held=held))
        await until(lambda: worker.frames("cancel") == ["r"])


class Lost:
    """A request that is on the link."""

    def __init__(self) -> None:
        self.errors: list[WorkerLost] = []

    def on_reserved(self, link: WorkerLink, reserved: worker_pb2.Reserved) -> None: ...

    def on_prompt_scores(self, link: WorkerLink, scores: worker_pb2.PromptScores) -> None: ...

    def on_token(self, link: WorkerLink, token: worker_pb2.StepToken, now_s: float) -> None: ...

    def on_handoff(self, link: WorkerLink, done: worker_pb2.HandoffDone, age_s: float) -> None: ...

    def on_held(self, link: WorkerLink, held: worker_pb2.Held) -> None: ...

    def on_ended(self, link: WorkerLink, ended: worker_pb2.Ended) -> None: ...

    stays_when_stalled = False

    def on_stalled(self, link: WorkerLink, error: WorkerLost) -> None: ...

    def on_stall_ended(self, link: WorkerLink, *, died: bool) -> None: ...

    def on_lost(self, link: WorkerLink, error: WorkerLost) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(("owner", "fault"), [(FrameQueue, "next_message"), (WorkerLink, "_deliver")])
async def test_a_bug_on_either_side_of_a_link_ends_its_requests_and_it_connects_again(
    owner: type, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(takes_more=True) as (worker, link):
        request = Lost()
        link.attach("r", request)
        with monkeypatch.context() as broken:
            broken.setattr(owner, fault, lambda *args: 1 / 0)
            work = worker_pb2.Work(request_id="r", prompt=[1, 2], sampling=sampling_frame(SamplingParams(max_tokens=2)))
            link.send("r", worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)))  # it answers
            await until(lambda: bool(request.errors))
        assert [str(error) for error in request.errors] == ["worker w was lost (internal error); a retry may succeed"]
        await until(lambda: link.ready)
        link.cancel("again")
        await until(lambda: "again" in worker.frames("cancel"))
    assert "internal error on a worker link: reconnecting" in caplog.text
