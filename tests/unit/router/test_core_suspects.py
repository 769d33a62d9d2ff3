"""Requests that may be what stops workers: where they go, what they wait for, and what waits for them."""

from __future__ import annotations

import pytest

from router.prefix_index.mirror import WorkerKey
from router.requests import events as ev
from router.requests.deaths import MAX_DEATHS
from tandem.errors import ErrorCode, RequestQuarantined, WorkerLost, error_from_code
from tandem.images import PromptImage
from tests.unit.router.core_cluster import Asked, CoreCluster

DIED = error_from_code(ErrorCode.WORKER_DIED, "its process ended")


class Hospital:
    """Three workers, none of which answers by itself."""

    def __init__(self) -> None:
        self.cluster = CoreCluster("d0", "d1", "d2")
        for worker in self.cluster.workers.values():
            worker.prefill_s = 1000.0

    def ask(self) -> Asked:
        asked = self.cluster.ask(40)
        self.cluster.run(0.01)
        return asked

    def at(self, asked: Asked) -> WorkerKey:
        decode = asked.run.decode
        assert decode is not None
        return decode

    def stall(self, asked: Asked) -> WorkerKey:
        """Its worker shows no progress, so the request leaves it."""
        worker = self.at(asked)
        self._off(worker)
        self.cluster.core.on(asked.run, ev.WorkerStalled(worker, WorkerLost("silent")))
        self.cluster.run(0.01)
        return worker

    def die(self, asked: Asked) -> WorkerKey:
        worker = self.at(asked)
        self._off(worker)
        self.cluster.core.on(asked.run, ev.WorkerGone(worker, DIED))
        self.cluster.run(0.01)
        return worker

    def _off(self, worker: WorkerKey) -> None:
        self.cluster.fleet.health.set_up(worker, is_up=False)
        self.cluster.workers[worker].worker.link.ready = False


@pytest.fixture
def hospital() -> Hospital:
    return Hospital()


def test_the_third_worker_is_safe_until_the_first_is_heard_of(hospital: Hospital) -> None:
    core, asked = hospital.cluster.core, hospital.ask()
    first = hospital.stall(asked)
    second = hospital.die(asked)
    assert asked.run not in core.placer
    assert core.waiting() == [asked.run]
    assert core.active == 1, "a drain waits for it"
    assert not len(core.queue), "nothing waits behind it"
    other = hospital.ask()
    assert hospital.at(other) not in (first, second)
    core.on(asked.run, ev.SuspectDied(first))
    assert isinstance(asked.error, RequestQuarantined)
    assert core.waiting() == []
    hospital.cluster.cancel(other)
    assert core.active == 0


def test_it_goes_on_when_the_first_was_only_slow(hospital: Hospital) -> None:
    asked = hospital.ask()
    first = hospital.stall(asked)
    second = hospital.die(asked)
    hospital.cluster.core.on(asked.run, ev.SuspectHeard(first))
    hospital.cluster.run(0.01)
    assert hospital.at(asked) not in (first, second)
    hospital.cluster.cancel(asked)


@pytest.mark.parametrize(("images", "is_to_blame"), [((), False), ((PromptImage.of(0, 2, b"\x89PNG"),), True)])
def test_workers_that_die_before_the_prompt_may_have_died_of_its_images(
    images: tuple[PromptImage, ...], is_to_blame: bool
) -> None:
    """A worker reads them before it reserves blocks."""
    cluster = CoreCluster("p0", "d0", "d1", "d2")
    for worker in cluster.workers.values():
        worker.unanswered = frozenset({"reserve"})
    asked = cluster.ask(images=images)
    for _ in range(MAX_DEATHS):
        cluster.run(0.01)
        died = asked.run.decode
        assert died is not None
        cluster.fleet.health.set_up(died, is_up=False)
        cluster.workers[died].worker.link.ready = False
        cluster.core.on(asked.run, ev.WorkerGone(died, DIED))
    assert (asked.end is not None and isinstance(asked.error, RequestQuarantined)) == is_to_blame
    cluster.cancel(asked)


@pytest.mark.parametrize("event", [ev.Cancelled(), ev.Expired(), ev.Rejected(WorkerLost("the router stops"))])
def test_it_can_end_while_it_waits(hospital: Hospital, event: ev.Event) -> None:
    asked = hospital.ask()
    first = hospital.stall(asked)
    hospital.die(asked)
    hospital.cluster.core.on(asked.run, event)
    assert asked.end is not None
    assert hospital.cluster.core.active == 0
    hospital.cluster.core.on(asked.run, ev.SuspectHeard(first))
    assert hospital.cluster.core.active == 0


def test_two_suspects_do_not_share_a_worker(hospital: Hospital) -> None:
    """One of them would be taken for the other at the next death."""
    one, two = hospital.ask(), hospital.ask()
    while hospital.at(two) != hospital.at(one):
        hospital.cluster.cancel(two)
        two = hospital.ask()
    worker = hospital.at(one)
    hospital._off(worker)
    for asked in (one, two):
        hospital.cluster.core.on(asked.run, ev.WorkerStalled(worker, WorkerLost("silent")))
    hospital.cluster.run(0.01)
    assert len({worker, hospital.at(one), hospital.at(two)}) == 3
    for asked in (one, two):
        hospital.cluster.cancel(asked)
