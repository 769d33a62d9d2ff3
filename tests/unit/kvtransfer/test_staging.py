"""The staging that an agent's links share: bounded, and never given to two of them."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from kvtransfer.causes import DeviceLost, HandoffFault
from kvtransfer.pool import staging as module
from kvtransfer.pool.pool import Bytes, make_staging
from kvtransfer.pool.staging import SLOT_BYTES, STAGING_BYTES, LeaseLost, Staging


def make() -> Staging[Bytes]:
    return Staging(make_staging, 0)


def test_leases_do_not_overlap_and_are_reused() -> None:
    staging = make()
    with staging.lease(SLOT_BYTES + 1) as first, staging.lease(5) as second:
        first[:], second[:] = 1, 2
        assert first.size == SLOT_BYTES + 1
        assert second.size == 5
        assert np.all(first == 1)
        assert first.ctypes.data % 4096 == 0
    with staging.lease(5) as third:
        assert third.ctypes.data == staging.area.ctypes.data


def test_the_largest_lease_fits_four_times() -> None:
    large = Staging(make_staging, STAGING_BYTES)
    with ExitStack() as leases:
        sizes = [leases.enter_context(large.lease(STAGING_BYTES)).size for _ in range(4)]
    assert sizes == [STAGING_BYTES] * 4


def test_a_lease_waits_for_others_and_says_so_when_none_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = make()
    held = threading.Event()
    free = threading.Event()

    def hold() -> None:
        with staging.lease(STAGING_BYTES):
            held.set()
            free.wait(30.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30.0)
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    with pytest.raises(HandoffFault, match="too many handoffs at once"), staging.lease(1):
        pass
    monkeypatch.setattr(module, "WAIT_S", 30.0)
    free.set()
    with staging.lease(1) as one:
        assert one.size == 1
    holder.join()


def test_what_a_library_may_still_write_to_is_never_given_away_until_the_process_must_end() -> None:
    staging = make()
    with pytest.raises(LeaseLost), staging.lease(STAGING_BYTES // 2):
        raise LeaseLost("a read cannot be cancelled")
    with staging.lease(1) as one:
        assert one.ctypes.data - staging.area.ctypes.data == STAGING_BYTES // 2
    with pytest.raises(DeviceLost), staging.lease(1):
        raise LeaseLost("another")


def test_a_lease_is_given_back_after_an_error() -> None:
    staging = make()
    for _ in range(3):
        with pytest.raises(ValueError, match="x"), staging.lease(STAGING_BYTES):
            raise ValueError("x")
