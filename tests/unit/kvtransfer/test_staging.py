"""The staging that an agent's links share: bounded, and never given to two of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from kvtransfer.causes import DeviceLost, HandoffFault
from kvtransfer.pool import staging as module
from kvtransfer.pool.pool import Bytes, make_staging
from kvtransfer.pool.staging import SLOT_BYTES, STAGING_BYTES, LeaseLost, Staging

LARGEST = STAGING_BYTES * 3 // 4  # of what one direction may hold


def make() -> Staging[Bytes]:
    return Staging(make_staging, 0)


def test_leases_do_not_overlap_and_are_reused() -> None:
    staging = make()
    with staging.lease(SLOT_BYTES + 1, receives=False) as first, staging.lease(5, receives=False) as second:
        first[:], second[:] = 1, 2
        assert first.size == SLOT_BYTES + 1
        assert second.size == 5
        assert np.all(first == 1)
        assert first.ctypes.data % 4096 == 0
    with staging.lease(5, receives=False) as third:
        assert third.ctypes.data == staging.area.ctypes.data


def test_the_largest_lease_fits_thrice_each_way_and_four_times_in_all() -> None:
    for receives in (False, True):
        large = Staging(make_staging, STAGING_BYTES)
        with ExitStack() as leases:
            for _ in range(3):
                leases.enter_context(large.lease(STAGING_BYTES, receives=receives))
            assert leases.enter_context(large.lease(STAGING_BYTES, receives=not receives)).size == STAGING_BYTES


def test_a_lease_waits_for_others_and_says_so_when_none_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = make()
    held = threading.Event()
    free = threading.Event()

    def hold() -> None:
        with staging.lease(LARGEST, receives=False):
            held.set()
            free.wait(30.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30.0)
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    with pytest.raises(HandoffFault, match="too many handoffs at once"), staging.lease(1, receives=False):
        pass
    monkeypatch.setattr(module, "WAIT_S", 30.0)
    free.set()
    with staging.lease(1, receives=False) as one:
        assert one.size == 1
    holder.join()


class Link:
    """The link of a thread that waits."""

    def __init__(self) -> None:
        self.is_closed = False
        self.waits = threading.Event()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        self.waits.set()
        yield


def lease_in_thread(
    staging: Staging[Bytes], size_bytes: int, then: Callable[[], None]
) -> tuple[Link, threading.Thread]:
    """Starts to wait for a lease; `then` is called with it in hand."""
    link = Link()

    def run() -> None:
        module.set_waiter(link)
        with suppress(HandoffFault), staging.lease(size_bytes, receives=False):
            then()

    thread = threading.Thread(target=run)
    thread.start()
    assert link.waits.wait(30.0)
    return link, thread


def test_leases_are_given_in_the_order_of_their_requests_even_if_a_later_one_would_fit() -> None:
    staging, order = make(), list[str]()
    with staging.lease(LARGEST - SLOT_BYTES, receives=False):  # room for the small one
        _, large = lease_in_thread(staging, LARGEST, lambda: order.append("large"))
        _, small = lease_in_thread(staging, 1, lambda: order.append("small"))
    large.join(30.0)
    small.join(30.0)
    assert order == ["large", "small"]


def test_a_link_that_closes_leaves_the_queue_at_once() -> None:
    staging, given = make(), threading.Event()
    with staging.lease(LARGEST - SLOT_BYTES, receives=False):
        closed, large = lease_in_thread(staging, LARGEST, lambda: None)
        _, small = lease_in_thread(staging, 1, given.set)
        assert not given.is_set()
        closed.is_closed = True
        assert given.wait(30.0)
        large.join(30.0)
    small.join(30.0)


def test_what_a_library_may_still_write_to_is_never_given_away_until_the_process_must_end() -> None:
    staging = make()
    with pytest.raises(LeaseLost), staging.lease(STAGING_BYTES // 2, receives=False):
        raise LeaseLost("a read cannot be cancelled")
    with staging.lease(1, receives=False) as one:
        assert one.ctypes.data - staging.area.ctypes.data == STAGING_BYTES // 2
    with pytest.raises(DeviceLost), staging.lease(1, receives=False):
        raise LeaseLost("another")


def test_a_lease_is_given_back_after_an_error() -> None:
    staging = make()
    for _ in range(3):
        with pytest.raises(ValueError, match="x"), staging.lease(LARGEST, receives=False):
            raise ValueError("x")
