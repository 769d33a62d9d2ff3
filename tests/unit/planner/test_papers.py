"""Each paper's rule does what sets it apart, on traffic that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.simulator.result import SimResult
from planner.simulator.setup import Fault, Paper, Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.autoscaler import AutoscalerSpec
from tandem.errors import ConfigError
from tests.unit.planner.test_simulator import ended, one, setup_of, traffic

BUSY = Slo(ttft_s=0.5, tpot_s=0.05)


def by(paper: Paper | None, trace: TrafficTrace, setup: Setup, slo: Slo = BUSY) -> SimResult:
    found = simulate(trace, replace(setup, paper=paper), slo)
    assert ended(found) == found.finished == len(trace)
    return found


@pytest.mark.parametrize("paper", Paper)
def test_all_requests_end_and_all_blocks_come_back(paper: Paper) -> None:
    by(paper, traffic(), setup_of(0 if paper is Paper.ECOSERVE else 2, 2))


@pytest.mark.parametrize("paper", Paper)
def test_they_end_too_when_workers_are_lost(paper: Paper) -> None:
    setup = setup_of(0 if paper is Paper.ECOSERVE else 2, 2, faults=(Fault.parse("worker:decode-0@3+2"),))
    if paper is not Paper.ECOSERVE:
        setup = replace(setup, faults=(*setup.faults, *map(Fault.parse, ("worker:prefill-0@5", "worker:prefill-1@6"))))
    found = simulate(traffic(), replace(setup, paper=paper), BUSY)
    assert ended(found) == len(traffic())
    assert found.finished > 150


@pytest.mark.parametrize(
    ("paper", "prefill", "expected"), [(Paper.PPD, 0, "prefill workers"), (Paper.ECOSERVE, 1, "an aggregated cluster")]
)
def test_a_paper_about_other_clusters_is_refused(paper: Paper, prefill: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"--paper {paper}: expected {expected}"):
        simulate(traffic(20), setup_of(prefill, 1, paper=paper), BUSY)


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft_s=1.0), Slo(tpot_s=0.05)])
def test_its_objectives_must_be_given(slo: Slo) -> None:
    with pytest.raises(ConfigError, match="--paper taichi: expected --ttft and --tpot with it"):
        simulate(traffic(20), setup_of(1, 1, paper=Paper.TAICHI), slo)


def test_the_autoscaler_must_be_off() -> None:
    setup = setup_of(1, 1, paper=Paper.DEFLECTION, autoscaler=AutoscalerSpec(enabled=True))
    with pytest.raises(ConfigError, match="--paper deflection: expected no autoscaler"):
        simulate(traffic(20), setup, BUSY)


class TestDeflection:
    BURST = one(1000, 40, *((0.05, 1000, 40) for _ in range(5)))

    def test_a_burst_is_prefilled_on_decode_workers_too_in_steps_within_the_objective(self) -> None:
        usual, found = (by(paper, self.BURST, setup_of(1, 1)) for paper in (None, Paper.DEFLECTION))
        assert usual.local_prefills == 0 < found.local_prefills < 6
        assert found.ttft_s.p99 is not None
        assert usual.ttft_s.p99 is not None
        assert found.ttft_s.p99 < usual.ttft_s.p99
        assert found.itl_s.p99 is not None
        assert found.itl_s.p99 <= 0.05

    def test_what_decodes_there_leaves_no_room_for_a_chunk(self) -> None:
        """A step without a prompt takes 10 ms, one with the smallest chunk 11.6. Beside the first, nothing decodes."""
        late = one(100, 200, *((0.1, 1000, 10) for _ in range(4)))
        assert by(Paper.DEFLECTION, late, setup_of(1, 1), Slo(0.5, 0.011)).local_prefills == 1
        assert by(Paper.DEFLECTION, late, setup_of(1, 1), Slo(0.5, 0.03)).local_prefills > 1

    def test_all_requests_decode_in_each_step_when_the_prompts_are_done(self) -> None:
        """30 answers beside one deflected prompt, whose chunks of 16 tokens leave a budget below 30 behind."""
        beside = one(100, 400, *((0.001, 100, 400) for _ in range(4)), *((0.5, 100, 300) for _ in range(25)))
        found = by(Paper.DEFLECTION, beside, setup_of(1, 1), Slo(0.5, 0.0125))
        assert found.local_prefills > 0
        assert found.itl_s.p95 == pytest.approx(0.01, rel=0.02)


class TestPrefillCapableDecode:
    def turns(self, rate: float = 1.0) -> TrafficTrace:
        same = SharedPrefixes(count=1, tokens=640)
        return synthetic_trace(20, Gamma(rate, 0.1), LengthSpec(100), LengthSpec(20), prefixes=same)

    def test_a_prefix_that_many_share_makes_no_later_turn(self) -> None:
        shared = SharedPrefixes(count=1, tokens=64)
        trace = synthetic_trace(20, Gamma(1.0, 0.1), LengthSpec(100), LengthSpec(20), prefixes=shared)
        assert by(Paper.PPD, trace, setup_of(1, 2)).handoffs == 20

    def test_later_turns_stay_where_the_first_one_decodes(self) -> None:
        found = by(Paper.PPD, self.turns(), setup_of(1, 2))
        assert (found.handoffs, found.local_prefills) == (1, 19)

    def test_they_are_handed_off_if_that_costs_the_others_more(self) -> None:
        """Of a TPOT objective of 1 ms, ten milliseconds are much; of a TTFT objective of an hour, they are nothing."""
        found = by(Paper.PPD, self.turns(rate=20.0), setup_of(1, 1), Slo(ttft_s=3600.0, tpot_s=0.001))
        assert found.handoffs is not None
        assert found.handoffs > 1


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    rows = [*((0.0, 4000, 2) for _ in range(2)), *((0.01, 100, 2) for _ in range(5))]
    usual, found = (by(paper, one(4000, 2, *rows), setup_of(2, 1)) for paper in (None, Paper.LAPS))
    assert usual.ttft_s.p50 is not None
    assert found.ttft_s.p50 is not None
    assert found.ttft_s.p50 < usual.ttft_s.p50


class TestRollingActivation:
    def test_one_worker_takes_prompts_while_it_is_in_time(self) -> None:
        rare = one(500, 2, *((float(number), 500, 2) for number in range(1, 10)))
        use = by(Paper.ECOSERVE, rare, setup_of(0, 3)).pools["decode"]
        assert use.busiest == pytest.approx(3 * use.busy)

    def test_the_next_one_does_when_it_is_not(self) -> None:
        burst = one(4000, 2, *((0.0, 4000, 2) for _ in range(2)))
        use = by(Paper.ECOSERVE, burst, setup_of(0, 3)).pools["decode"]
        assert use.busiest == pytest.approx(use.busy)

    def test_what_decodes_is_stopped_for_no_longer_than_it_is_ahead(self) -> None:
        """Of 64 tokens half are done, each 4 ms ahead of 14: 128 ms. 1,000 tokens take 100 ms, 2,000 take 200."""
        slo = Slo(ttft_s=10.0, tpot_s=0.014)
        for prompt, workers in ((1000, 1), (2000, 2)):
            warm = [(float(number), 100, 64) for number in range(1, 40)]  # so that lengths and paces are known
            trace = one(100, 64, *warm, (40.0, 100, 64), (40.1, prompt, 2))
            use = by(Paper.ECOSERVE, trace, setup_of(0, 2), slo).pools["decode"]
            assert (use.busiest == pytest.approx(2 * use.busy)) is (workers == 1)


class TestLatencyShifting:
    def test_prompts_are_prefilled_where_they_decode_while_that_is_soon_enough(self) -> None:
        found = by(Paper.TAICHI, traffic(), setup_of(1, 2, max_step_tokens=256), Slo(60.0, 0.05))
        assert (found.handoffs, found.local_prefills) == (0, 200)

    def test_others_are_prefilled_on_prefill_heavy_workers(self) -> None:
        found = by(Paper.TAICHI, traffic(), setup_of(1, 2, max_step_tokens=256), Slo(0.1, 0.05))
        assert found.handoffs is not None
        assert 0 < found.handoffs < 200

    def test_they_decode_there_while_decode_heavy_workers_are_full(self) -> None:
        setup = setup_of(1, 1)
        small = replace(setup, decode=replace(setup.decode, kv_tokens=1024))
        burst = one(900, 100, *((0.2, 900, 100) for _ in range(3)))
        found = by(Paper.TAICHI, burst, small)
        assert found.handoffs == 0
        assert found.local_prefills == 4
        assert min(use.busy for use in found.pools.values()) > 0.1
