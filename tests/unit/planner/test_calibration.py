"""Calibration: known corrections come back, their error is of other requests, and what cannot be trusted is refused
by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.calibration.calibrate import Corrected, calibrate, with_corrections
from planner.calibration.doubts import alone_s, check, decode_batch, measured_rows, notes_on, tells_fixed_time
from planner.calibration.file import Calibration, HeldOut, read_calibration, write_calibration
from planner.calibration.fit import Seen, fit
from planner.calibration.held_out import judged
from planner.cost import CorrectedCostModel, Corrections, PrefillWork
from planner.devices import find_device
from planner.fitted import FittedCostModel, PiecewisePlane, Plane
from planner.hardware import ROOFLINE_ERROR, Hardware, check_calibration, cost_digest, setup_of_spec
from planner.models import ElementSizes, find_model
from planner.search.evaluate import Evaluator
from planner.search.layout import ClusterLayout
from planner.shapes import LinkShape
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate, simulated_times
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InputError

TRUTH = Corrections(1.3, 0.8, 0.012)
MADE = datetime(2026, 11, 29, 12, tzinfo=UTC)
BEGAN_S = MADE.timestamp() - 3600
COST = FittedCostModel(
    PiecewisePlane((Plane(0.004, 2e-4, 0.0),)), PiecewisePlane((Plane(0.01, 0.0, 0.001),)), LinkShape(1e9)
)


def hardware(**changes: Any) -> Hardware:
    return Hardware(find_model("llama-3-8b", ElementSizes(2.0, 2.0)), find_device("h100"), **changes)


def setup(of: Hardware | None = None, **model: Any) -> Setup:
    model = {"engine": {"max_step_tokens": 4096}} | model
    spec = ClusterSpec.model_validate({"models": [model], "control": {"backend": "subprocess"}})
    return setup_of_spec(spec, of or hardware(), mean_prompt_tokens=1000.0, trace_block=None)


def traffic(count: int = 230, rate: float = 5.0, prompt_cv: float = 0.9, output: int = 12) -> TrafficTrace:
    lengths = LengthSpec(800, prompt_cv, 4000), LengthSpec(output, 0.5 if output > 1 else 0.0, 60)
    return synthetic_trace(count, Gamma(rate, 1.0), *lengths, seed=3)


def recorded(trace: TrafficTrace, ttft_s: Iterable[float], decode_s: Iterable[float]) -> TrafficTrace:
    return replace(trace, measured=MeasuredTimes(np.array([*ttft_s]), np.array([*decode_s]), BEGAN_S))


def times_of(ttft_s: Any, decode_s: Any) -> MeasuredTimes:
    return MeasuredTimes(np.asarray(ttft_s, np.float64), np.asarray(decode_s, np.float64))


def noise(count: int, share: float, seed: int = 5) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = np.exp(share * np.random.default_rng(seed).standard_normal(count))
    return drawn


def recording(of: Setup, truth: Corrections, trace: TrafficTrace) -> TrafficTrace:
    """As if a cluster had taken what the corrected simulation takes, give or take a few per cent."""
    times, count = simulated_times(trace, with_corrections(of, truth)), len(trace)
    return recorded(trace, times.ttft_s * noise(count, 0.03), times.decode_s * noise(count, 0.03, 6))


@pytest.fixture(scope="module")
def found() -> Calibration:
    base = hardware()
    corrected = Corrected(base.model.name, base.device.name, cost_digest(base, 1))
    return calibrate(recording(setup(), TRUTH, traffic()), setup(), corrected, MADE)


class TestRecovery:
    def test_known_corrections_come_back_from_simulated_traffic(self, found: Calibration) -> None:
        assert found.prefill == pytest.approx(TRUTH.prefill, rel=0.05)
        assert found.decode == pytest.approx(TRUTH.decode, rel=0.02)
        assert found.fixed_s == pytest.approx(TRUTH.fixed_s, rel=0.2)

    def test_the_error_on_what_was_held_out_shrinks(self, found: Calibration) -> None:
        assert found.held_out.error_before is not None
        assert found.held_out.error_before > 0.15
        assert found.held_out.error < 0.06
        assert found.held_out.low <= found.held_out.error <= found.held_out.high
        assert found.notes == ()
        assert found.held_out.requests == pytest.approx(230 * 5 / 11, abs=1)

    def test_an_uneven_queue_does_not_hide_the_least_loss(self) -> None:
        """The loss has dips beside the truth, the first of them where a search that only narrows would end."""
        trace = traffic(400)
        prompts_s, rows = 1e-4 * trace.prompt_tokens, np.arange(400)

        def predict(prefill: float, decode: float) -> MeasuredTimes:
            ripple = 1 + 0.1 * math.sin(20 * math.log(prefill / 0.6)) * (prompts_s > prompts_s.mean())
            return times_of(prefill * prompts_s * ripple, decode * 0.01 * (trace.output_tokens - 1.0))

        truth = predict(0.6, 2.5)
        measured = times_of(truth.ttft_s + 0.02, truth.decode_s)
        result = fit(Seen(measured, trace.output_tokens, rows), predict, has_fixed=True)
        assert (result.prefill, result.decode) == pytest.approx((0.6, 2.5), rel=0.02)
        assert result.fixed_s == pytest.approx(0.02, rel=0.1)

    def test_other_requests_may_wait_than_did_in_the_cluster(self) -> None:
        trace = traffic(400)
        prompts_s = 1e-4 * trace.prompt_tokens

        def predict(prefill: float, decode: float) -> MeasuredTimes:
            others = np.random.default_rng(round(1e6 * prefill)).permutation(prompts_s)
            return times_of(prefill * others, decode * 0.01 * (trace.output_tokens - 1.0))

        measured = times_of(0.6 * prompts_s + 0.02, 0.01 * (trace.output_tokens - 1.0))
        result = fit(Seen(measured, trace.output_tokens, np.arange(400)), predict, has_fixed=True)
        assert result.prefill == pytest.approx(0.6, rel=0.02)
        assert result.fixed_s == pytest.approx(0.02, rel=0.1)

    def test_the_first_simulation_may_finish_nothing(self) -> None:
        trace = traffic(400)

        def predict(prefill: float, decode: float) -> MeasuredTimes:
            if prefill > 0.5 or decode > 0.5:
                return times_of(np.full(400, np.nan), np.full(400, np.nan))
            return times_of(prefill * 1e-3 * trace.prompt_tokens, decode * 0.01 * (trace.output_tokens - 1.0))

        measured = times_of(0.3e-3 * trace.prompt_tokens, 0.002 * (trace.output_tokens - 1.0))
        result = fit(Seen(measured, trace.output_tokens, np.arange(400)), predict, has_fixed=False)
        assert (result.prefill, result.decode) == pytest.approx((0.3, 0.2), rel=0.01)
        assert result.fixed_s == 0.0


class TestHeldOut:
    def test_the_error_is_the_larger_mean_of_ttft_and_tpot(self) -> None:
        count = 400
        outputs, rows = np.full(count, 11), np.arange(count)
        seconds = noise(count, 0.5)
        measured = MeasuredTimes(seconds, 10 * seconds)
        after = MeasuredTimes(1.1 * seconds, 8 * seconds)
        result = judged(measured, MeasuredTimes(2 * seconds, 10 * seconds), after, outputs, rows)
        assert (result.error, result.error_before) == pytest.approx((0.2, 1.0))
        tpot = next(each for each in result.figures if (each.metric, each.percentile) == ("TPOT", "p50"))
        assert tpot.measured_s == pytest.approx(np.median(seconds))
        assert tpot.after_s == pytest.approx(0.8 * tpot.measured_s)
        assert (tpot.low, tpot.high) == pytest.approx((-0.2, -0.2)), "as far off in every draw"

    def test_fewer_requests_make_a_wider_interval(self) -> None:
        outputs = np.full(3000, 11)

        def width(count: int) -> float:
            measured = MeasuredTimes(noise(3000, 0.5), noise(3000, 0.5, 7))
            after = MeasuredTimes(noise(3000, 0.5, 8), noise(3000, 0.5, 9))
            result = judged(measured, after, after, outputs, np.arange(count))
            return result.high - result.low

        assert width(100) > 2 * width(3000) > 0

    def test_answers_that_came_at_once_have_no_infinite_error(self) -> None:
        measured, after = times_of(np.ones(300), np.zeros(300)), times_of(np.ones(300), np.ones(300))
        assert math.isfinite(judged(measured, after, after, np.full(300, 9), np.arange(300)).error)

    def test_it_is_the_same_every_time(self) -> None:
        measured, after = (MeasuredTimes(noise(300, 0.5, at), noise(300, 0.5, at + 1)) for at in (1, 3))
        once, again = (judged(measured, after, after, np.full(300, 9), np.arange(300)) for _ in range(2))
        assert once == again


class TestRefusals:
    def test_a_recording_without_times(self) -> None:
        with pytest.raises(InputError, match=r"expected requests with measured times \(ttft_s, decode_s\), got none"):
            measured_rows(traffic())

    def test_too_few_requests_and_how_long_to_record(self) -> None:
        trace = traffic(100, rate=1.0)
        with pytest.raises(
            InputError, match=r"at least 200 requests with measured times, got 100: at .* record [34] min"
        ):
            measured_rows(recorded(trace, np.ones(100), np.ones(100)))

    def test_rows_without_times_do_not_count(self) -> None:
        trace = traffic(250)
        times = np.where(np.arange(250) < 60, np.nan, 1.0)
        with pytest.raises(InputError, match="got 190"):
            measured_rows(recorded(trace, times, times))
        known = np.where(np.arange(250) < 20, np.nan, 1.0)
        assert measured_rows(recorded(trace, known, known)).tolist() == [*range(20, 250)]

    def test_answers_of_one_token(self) -> None:
        trace = replace(traffic(250), output_tokens=np.ones(250, np.int64))
        with pytest.raises(InputError, match=r"decode: expected at least 100 answers of two tokens or more .* got 0"):
            measured_rows(recorded(trace, np.ones(250), np.zeros(250)))

    @pytest.mark.parametrize(
        ("found", "said"),
        [
            (Corrections(prefill=19.0), "prefill: expected a factor from 0.1 to 10, got at least 19"),
            (Corrections(decode=0.06), "decode: expected a factor from 0.1 to 10, got at most 0.06"),
            (Corrections(fixed_s=1.5), "fixed time: expected at most 1 s before the first token, got 1.50 s"),
        ],
    )
    def test_corrections_that_no_cluster_has(self, found: Corrections, said: str) -> None:
        trace = recorded(traffic(250), np.ones(250), np.ones(250))
        with pytest.raises(InputError, match=said):
            check(found, trace, np.ones(250), MeasuredTimes(np.ones(250), np.ones(250)), np.arange(250))

    def test_a_simulation_that_does_not_finish_what_the_cluster_did(self) -> None:
        trace = recorded(traffic(250), np.ones(250), np.ones(250))
        after = np.where(np.arange(250) < 10, np.nan, 1.0)
        with pytest.raises(InputError, match="got 4% that it does not; check the spec"):
            check(Corrections(), trace, np.ones(250), MeasuredTimes(after, after), np.arange(250))

    def test_a_load_at_which_requests_mostly_wait(self) -> None:
        trace, rows = recorded(traffic(250), np.ones(250), np.ones(250)), np.arange(250)
        check(Corrections(), trace, np.full(250, 0.25), MeasuredTimes(np.ones(250), np.ones(250)), rows)
        with pytest.raises(InputError, match=r"wait for at most 80% of their TTFT, got 85%.* record at a lower load"):
            check(Corrections(), trace, np.full(250, 0.15), MeasuredTimes(np.ones(250), np.ones(250)), rows)

    def test_a_spec_with_two_models(self) -> None:
        spec = ClusterSpec.model_validate(
            {"models": [{"name": "a"}, {"name": "b"}], "control": {"backend": "subprocess"}}
        )
        with pytest.raises(ConfigError, match="expected one model to simulate, got 2"):
            setup_of_spec(spec, hardware(), mean_prompt_tokens=100.0, trace_block=None)


class TestNotes:
    HELD_OUT = HeldOut(requests=100, error=0.05, low=0.02, high=0.08, error_before=0.3, figures=())

    def said(self, batch: float = 4.0, fixed_s: float | None = 0.1, **held_out: float) -> str:
        trace = recorded(traffic(250), np.ones(250), np.ones(250))
        judgement = self.HELD_OUT.model_copy(update=held_out)
        return "; ".join(notes_on(trace, np.arange(250), batch, fixed_s, judgement))

    def test_nothing_to_note(self) -> None:
        assert self.said() == ""

    def test_requests_that_decode_alone(self) -> None:
        assert "decode: requests rarely decoded together" in self.said(batch=1.0)

    def test_prompts_that_are_alike(self) -> None:
        assert "fixed time: prompts are too alike" in self.said(fixed_s=None)
        assert not tells_fixed_time(alone_s(traffic(prompt_cv=0.1), setup()))
        assert tells_fixed_time(alone_s(traffic(), setup()))

    def test_a_fixed_time_that_is_no_networks(self) -> None:
        assert "fixed time: 250 ms are more than routers and networks take" in self.said(fixed_s=0.25)

    def test_corrections_that_do_not_help_or_leave_much(self) -> None:
        assert "do not help: 30% off on average without them, 31% with them" in self.said(error=0.31)
        assert "still 29% off on average" in self.said(error=0.29)

    def test_the_decode_batch_is_that_of_a_worker(self) -> None:
        trace = replace(traffic(240), arrival_s=(np.arange(240) // 6 * 10.0).astype(np.float64))
        measured = MeasuredTimes(np.ones(240), np.full(240, 5.0))
        assert decode_batch(trace, measured, np.arange(240), 1) == 6.0
        assert decode_batch(trace, measured, np.arange(240), 3) == 2.0
        assert decode_batch(trace, measured, np.arange(240), 8) == 1.0


class TestCorrectedCost:
    def test_prompts_and_decoding_have_their_own_factor_in_one_step(self) -> None:
        corrected = CorrectedCostModel(COST, 3.0, 0.5)
        prefills = [PrefillWork(100, 0)]
        assert corrected.step_s((), 4, 100) == pytest.approx(0.5 * 0.014)
        assert corrected.step_s(prefills, 0, 0) == corrected.prefill_s(100, 0) == pytest.approx(3.0 * 0.024)
        assert CorrectedCostModel(COST, 1.5, 2.0).step_s(prefills, 4, 100) == pytest.approx(2.0 * 0.014 + 1.5 * 0.020)
        assert corrected.step_s(prefills, 4, 100) == pytest.approx(3.0 * 0.024), "as long as its prompts alone"
        assert corrected.transfer_s(1000) == COST.transfer_s(1000)

    def test_no_corrections_leave_the_cost_model_as_it_is(self) -> None:
        assert Corrections().of(COST) is COST

    def test_the_fixed_time_delays_first_tokens_and_nothing_else(self) -> None:
        trace = traffic(40)
        late = replace(setup(), fixed_s=0.5)
        before, after = simulated_times(trace, setup()), simulated_times(trace, late)
        assert after.ttft_s.tolist() == pytest.approx((before.ttft_s + 0.5).tolist())
        assert after.decode_s.tolist() == pytest.approx(before.decode_s.tolist(), rel=1e-6)
        queued_s = [simulate(trace, each).queue_s.p50 for each in (setup(), late)]
        assert queued_s[1] == pytest.approx(queued_s[0], abs=1e-9)


class TestFile:
    def test_what_is_written_is_read(self, found: Calibration, tmp_path: Path) -> None:
        write_calibration(found, path := tmp_path / "c.json")
        again = read_calibration(path)
        assert again == found
        assert (again.model, again.device, again.widths, again.made) == ("llama-3-8b", "h100", {1}, MADE)
        assert again.load.began == datetime(2026, 11, 29, 11, tzinfo=UTC)
        assert (again.load.requests, again.load.decode_batch > 1) == (230, True)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"prefill": 0.0}, "prefill: .*greater than 0"),
            ({"decode": "fast"}, "decode: "),
            ({"more": 1}, "more: Extra"),
        ],
    )
    def test_a_file_that_is_none(self, found: Calibration, tmp_path: Path, change: dict[str, Any], said: str) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(found.model_dump(mode="json") | change))
        with pytest.raises(ConfigError, match=rf"expected a file of `tandem calibrate`: {said}"):
            read_calibration(path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--calibration: .*: No such file"):
            read_calibration(tmp_path / "c.json")

    def test_it_is_of_one_model_device_and_cost_model(self, found: Calibration) -> None:
        check_calibration(found, hardware())
        with pytest.raises(ConfigError, match="expected one made for device h200, got one for h100"):
            check_calibration(found, replace(hardware(), device=find_device("h200")))
        with pytest.raises(ConfigError, match="expected one made for model llama-2-7b, got one for llama-3-8b"):
            check_calibration(found, replace(hardware(), model=find_model("llama-2-7b")))
        for other in (
            hardware(measured={1: COST}),
            replace(hardware(), model=find_model("llama-3-8b", ElementSizes(1.0))),
        ):
            with pytest.raises(ConfigError, match="expected the cost model that it corrects"):
                check_calibration(found, other)
        dearer = find_device("h100").model_copy(update={"price_per_hour": 9.0})
        check_calibration(found, replace(hardware(), device=dearer))


class TestHardware:
    def test_steps_and_the_fixed_time_are_corrected(self, found: Calibration) -> None:
        plain, corrected = hardware(), hardware(calibration=found)
        for phase, factor in (("prefill_s", found.prefill), ("decode_step_s", found.decode)):
            assert getattr(corrected.cost(1), phase)(64, 640) == pytest.approx(
                factor * getattr(plain.cost(1), phase)(64, 640)
            )
        assert setup(corrected).fixed_s == found.fixed_s
        assert setup(plain).fixed_s == 0.0

    def test_its_error_on_other_requests_is_that_of_a_plan(self, found: Calibration) -> None:
        corrected = hardware(calibration=found)
        assert corrected.cost_error(1) == found.held_out.error
        device = find_device("h100").cost_error
        assert device is not None
        assert corrected.cost_error(2) == max(device, found.held_out.error)
        assert hardware().cost_error(2) == device != ROOFLINE_ERROR

    def test_other_widths_are_noted(self, found: Calibration) -> None:
        assert found.notes_for({1}) == ()
        assert found.notes_for({1, 2, 4}) == ("calibrated at TP 1: for TP 2, 4 the same factors are an assumption",)

    def test_a_search_simulates_with_it(self, found: Calibration) -> None:
        trace, layout = traffic(60), ClusterLayout(1, 1, 1, 1, 4096)
        slow = Evaluator(trace, hardware(calibration=found), Slo()).setup(layout)
        assert (slow.fixed_s, slow.prefill is not None) == (found.fixed_s, True)
        plain = Evaluator(trace, hardware(), Slo()).setup(layout)
        assert slow.decode.cost.decode_step_s(8, 800) < plain.decode.cost.decode_step_s(8, 800)
