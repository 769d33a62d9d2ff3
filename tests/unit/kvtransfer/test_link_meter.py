"""What a link is said to reach is what moved in the time in which something moved."""

from __future__ import annotations

import pytest

from kvtransfer.link.meter import HALF_LIFE_BYTES, LinkMeter
from tandem.testing.models import FakeClock


def move(meter: LinkMeter, clock: FakeClock, size_bytes: int, seconds: float, seq: int = 0) -> None:
    meter.pushed("t", seq, size_bytes)
    clock.advance(seconds)
    meter.acknowledged("t", seq)


def test_nothing_is_said_before_anything_was_measured() -> None:
    meter = LinkMeter(FakeClock())
    assert (meter.latency_s, meter.bytes_per_s) == (None, None)


def test_latency_is_the_shortest_probe_of_this_connection() -> None:
    meter = LinkMeter(FakeClock())
    for round_trip_s in (0.003, 0.001, 0.002):
        meter.probed(round_trip_s)
    assert meter.latency_s == 0.001
    meter.reconnected()
    meter.probed(0.005)
    assert meter.latency_s == 0.005


def test_time_between_pieces_does_not_count() -> None:
    clock = FakeClock()
    meter = LinkMeter(clock)
    move(meter, clock, 1000, 0.5)
    clock.advance(3600)
    move(meter, clock, 1000, 0.5)
    assert meter.bytes_per_s == pytest.approx(2000)


def test_time_in_which_several_pieces_are_on_their_way_counts_once() -> None:
    clock = FakeClock()
    meter = LinkMeter(clock)
    for seq in range(4):
        meter.pushed("t", seq, 1000)
        clock.advance(0.25)
    for seq in range(4):
        clock.advance(0.25)
        meter.acknowledged("t", seq)
    assert meter.bytes_per_s == pytest.approx(2000)


def test_old_bytes_weigh_less() -> None:
    clock = FakeClock()
    meter = LinkMeter(clock)
    move(meter, clock, HALF_LIFE_BYTES, 1.0)
    move(meter, clock, HALF_LIFE_BYTES, 0.1)
    assert meter.bytes_per_s == pytest.approx(1.5 * HALF_LIFE_BYTES / 0.6)


def test_a_ticket_that_ended_early_stops_the_watch_and_unknown_pieces_change_nothing() -> None:
    clock = FakeClock()
    meter = LinkMeter(clock)
    meter.pushed("t", 0, 1000)
    meter.pushed("t", 1, 1000)
    clock.advance(1)
    meter.acknowledged("t", 0)
    meter.dropped("t")
    meter.acknowledged("t", 1)
    clock.advance(100)
    assert meter.bytes_per_s == pytest.approx(1000)
