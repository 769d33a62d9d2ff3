"""The part of a trace that a plan simulates, and what a plan says if it is too short for its answers."""

from __future__ import annotations

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.goal import Goal
from planner.search.plan import SearchOptions, make_plan
from planner.search.traffic import busiest, with_note_if_short
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace


def test_the_busiest_part_may_be_the_last() -> None:
    quiet, busy = np.arange(80.0), 80.0 + np.arange(20) / 10
    arrival_s, tokens = np.append(quiet, busy), np.full(100, 10)
    part = busiest(TrafficTrace("t", arrival_s, tokens, tokens), 20)
    assert part.span_s == pytest.approx(1.9)
    assert part.notes[-1] == "the busiest 20 of 100 requests: 2 s from second 80"


class TestShortTraffic:
    """200 answers of 500 tokens at 10 requests a second: 19 s, in which none that takes 20 s makes room for another."""

    PART = synthetic_trace(200, Gamma(10.0, 0.5), LengthSpec(100), LengthSpec(500), seed=1)

    def notes(self, of: int, tpot_s: float) -> tuple[str, ...]:
        return with_note_if_short(self.PART, of, tpot_s).notes[len(self.PART.notes) :]

    def test_a_part_shorter_than_two_answers_says_how_many_requests_it_takes(self) -> None:
        (note,) = self.notes(1000, 0.04)
        assert note.startswith("19 s are short for answers of up to 20 s")
        assert 400 < int(note.rpartition("raise --simulated to ")[2]) < 440

    def test_of_a_whole_trace_there_is_no_more(self) -> None:
        (note,) = self.notes(200, 0.04)
        assert note.endswith("use a longer trace")

    def test_a_part_of_two_answers_is_long_enough(self) -> None:
        assert self.notes(1000, 0.018) == ()

    def test_it_is_a_note_on_the_plans_traffic(self) -> None:
        hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
        goal = Goal(Slo(1.0, 0.06), 0.9, 1)
        found = make_plan(self.PART, hardware, goal, SearchOptions(requests=50))
        assert any("raise --simulated" in note for note in found.traffic)
