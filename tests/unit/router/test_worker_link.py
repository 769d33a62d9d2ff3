"""How a router's frames go to a worker: what waits goes in one message, where the worker takes it so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.testing.stub_worker import StubWorker, until
from router.workers.link import MAX_MESSAGE_BYTES, WorkerLink
from tandem.config.spec import Role
from tandem.v1 import worker_pb2

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


def cancel(request_id: str) -> worker_pb2.RouterFrame:
    return worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id=request_id))


@pytest.mark.parametrize(("takes_more", "messages"), [(True, 1), (False, 5)])
async def test_frames_of_one_turn_are_one_message_to_a_worker_that_takes_more(takes_more: bool, messages: int) -> None:
    async with linked(takes_more=takes_more) as (worker, link):
        ids = [f"r{number}" for number in range(5)]
        for each in ids:
            link.send(cancel(each))
        await until(lambda: len(worker.received) == 5)
        assert worker.frames("cancel") == ids
        assert worker.messages == HELLO + messages
        assert link.sent_frames == 5


async def test_a_message_of_several_frames_stays_small_and_a_long_frame_goes_alone() -> None:
    async with linked(takes_more=True) as (worker, link):
        ids = [str(number) * (MAX_MESSAGE_BYTES // 3) for number in range(4)] + ["5" * MAX_MESSAGE_BYTES, "6"]
        for each in ids:
            link.send(cancel(each))
        await until(lambda: len(worker.received) == 6)
        assert worker.frames("cancel") == ids
        assert worker.messages == HELLO + 4  # two thirds, two thirds, the whole of it, and the last
