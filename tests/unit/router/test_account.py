"""What a worker has to do, as a router sees it that is not the only one."""

from __future__ import annotations

from typing import Any

import pytest

from router.policies.pace_estimates import Estimates
from router.workers.fleet import Worker
from router.workers.link import WorkerLink
from router.workers.load_account import Account, Charge
from tandem.clock import SystemClock
from tandem.config.model import Role
from tandem.v1 import cluster_pb2, worker_pb2


class Listener:
    def link_changed(self, link: WorkerLink) -> None: ...

    def load_changed(self, link: WorkerLink) -> None: ...

    def work_began(self, link: WorkerLink) -> None: ...


def worker(**load: Any) -> Worker:
    """Its last report: `load`, and 40 of 100 blocks free or evictable."""
    link = WorkerLink(cluster_pb2.WorkerInfo(worker_id="w", epoch=1, total_blocks=100), "router-0", Listener())
    link.load = worker_pb2.WorkerLoad(blocks=worker_pb2.BlockCounts(free=30, cached=10, total=100), **load)
    return Worker(link, Role.PREFILL, Account(), Estimates(SystemClock()).worker("tiny", Role.PREFILL))


def seen(worker: Worker) -> tuple[int, int, int]:
    """Outstanding tokens, requests, free blocks."""
    candidate = worker.candidate(0)
    return candidate.outstanding_tokens, candidate.running_requests, candidate.free_blocks


def test_what_other_routers_gave_it_counts_as_much_as_what_this_one_did() -> None:
    assert seen(worker(waiting_tokens=900, waiting_requests=2, running_requests=1, reserved_requests=4)) == (900, 7, 40)


def test_what_went_out_after_the_last_report_is_added_and_what_the_report_knows_of_is_not() -> None:
    busy = worker(waiting_tokens=900, running_requests=3)
    first, second, unsent = Charge(500, 32, frame=4), Charge(70, 5, frame=6), Charge(8, 1)
    for charge in (first, second, unsent):
        busy.account.add(charge)
    busy.link.seen_frames = 3
    assert seen(busy) == (900 + 578, 6, 2)
    busy.link.seen_frames = 5  # the report's 900 tokens have the first among them
    assert seen(busy) == (900 + 78, 5, 34)
    busy.link.seen_frames = 6
    assert seen(busy) == (908, 4, 39)
    unsent.frame = 9
    busy.link.seen_frames = 9
    assert seen(busy) == (900, 3, 40)
    assert busy.candidate(0).dispatched_tokens == 578, "all of it is ours until it is computed"


def test_a_long_prompt_counts_for_what_is_left_of_it() -> None:
    busy = worker(waiting_tokens=30_000)
    busy.account.add(Charge(30_000, 40, frame=1))
    busy.link.seen_frames = 1
    busy.link.load = worker_pb2.WorkerLoad(waiting_tokens=4_000)
    assert busy.candidate(0).outstanding_tokens == 4_000


@pytest.mark.parametrize("frame", [None, 1, 2])
@pytest.mark.parametrize("prefilled", [False, True])
def test_nothing_is_left_of_a_request_that_is_over(frame: int | None, prefilled: bool) -> None:
    """At whatever point of its way: not sent, sent and reported, sent and not reported."""
    account, charge = Account(), Charge(100, 7)
    account.add(charge)
    charge.frame = frame
    account.acknowledge(1)
    if prefilled:
        account.prefilled(charge)
        assert account.prefill_tokens == account.unreported_tokens == 0
    account.remove(charge)
    assert account == Account()


def test_a_worker_that_does_not_count_frames_is_charged_until_the_request_is_over() -> None:
    silent, charge = worker(), Charge(100, 7, frame=1)
    silent.account.add(charge)
    assert seen(silent) == (100, 1, 33)
    silent.account.prefilled(charge)
    assert seen(silent) == (0, 1, 33)
    silent.account.remove(charge)
    assert seen(silent) == (0, 0, 40)


def test_a_charge_of_an_earlier_listing_is_not_taken_off_another_account() -> None:
    """A worker may leave the directory and come back with its epoch, while a request still holds its old charge."""
    account, old = Account(), Charge(100, 7)
    account.prefilled(old)
    account.remove(old)
    assert account == Account()


def test_a_candidate_says_that_its_steps_are_bounded() -> None:
    plain = worker()
    assert not plain.candidate(0).bounds_steps
    plain.link.info.bounds_steps = True
    assert plain.candidate(0).bounds_steps
