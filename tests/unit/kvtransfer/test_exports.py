from __future__ import annotations

from kvtransfer.control import Range
from kvtransfer.session.exports import Exports, Ready


class HandClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def make_range(export_id: str, *, in_cache: bool = False, first: int = 0) -> Range:
    return Range(export_id, first, (7, 8), 4, in_cache, is_last=True)


def test_a_layer_is_ready_when_it_is_done() -> None:
    exports = Exports(3, HandClock(), 10.0)
    exports.open("a")
    assert exports.begin_step([make_range("a")]) == []
    assert exports.layer_done(0) == [("a", Ready(0, (7, 8), 4, 0, 1))]
    assert exports.layer_done(0) == []
    assert exports.layer_done(2) == [("a", Ready(0, (7, 8), 4, 1, 2))]
    assert exports.layer_done(3) == []


def test_cached_blocks_are_ready_at_once_with_all_layers() -> None:
    exports = Exports(3, HandClock(), 10.0)
    exports.open("a")
    assert exports.begin_step([make_range("a", in_cache=True)]) == [("a", Ready(0, (7, 8), 4, 0, 3))]
    assert exports.layer_done(0) == []


def test_what_comes_before_its_ticket_is_held_and_joined() -> None:
    exports = Exports(3, HandClock(), 10.0)
    exports.begin_step([make_range("a"), make_range("b", in_cache=True)])
    exports.layer_done(0)
    exports.layer_done(1)
    assert exports.open("a") == [Ready(0, (7, 8), 4, 0, 2)]
    assert exports.layer_done(2) == [("a", Ready(0, (7, 8), 4, 2, 1))]
    assert exports.open("b") == [Ready(0, (7, 8), 4, 0, 3)]


def test_what_nobody_asks_for_is_dropped_after_a_while() -> None:
    clock = HandClock()
    exports = Exports(3, clock, 10.0)
    exports.begin_step([make_range("a", in_cache=True)])
    clock.time_s = 11.0
    exports.tick()
    assert exports.open("a") == []


def test_of_an_export_that_was_closed_only_a_second_move_is_held() -> None:
    exports = Exports(3, HandClock(), 10.0)
    exports.open("a")
    exports.close("a")
    exports.begin_step([make_range("a")])
    assert exports.layer_done(2) == []
    assert exports.begin_step([make_range("a", in_cache=True)]) == []
    assert exports.open("a") == [Ready(0, (7, 8), 4, 0, 3)]


def test_what_is_held_is_bounded() -> None:
    exports = Exports(1, HandClock(), 10.0)
    exports.begin_step([make_range(f"r{number}", in_cache=True) for number in range(3000)])
    assert exports.open("r0") == []
    assert exports.open("r2999") != []
