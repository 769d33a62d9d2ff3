"""Makes a calibration from a recording and the cluster that it was recorded on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from planner.calibration.doubts import alone_s, check, decode_batch, measured_rows, notes_on, tells_fixed_time
from planner.calibration.file import Calibration, RecordedLoad
from planner.calibration.fit import Seen, fit
from planner.calibration.held_out import judged
from planner.cost import Corrections
from planner.simulator.setup import PoolSetup, Setup
from planner.simulator.simulate import simulated_times
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.version import tandem_version

WINDOWS = 11  # the first warms up, then the corrections are fitted to every other one and judged on those between
_UNIX_S = 1e9  # arrivals before are seconds since some other time


@dataclass(frozen=True, slots=True)
class Corrected:
    """Names of what is corrected. `cost`: digest of the cost model."""

    model: str
    device: str
    cost: str


def calibrate(trace: TrafficTrace, setup: Setup, corrected: Corrected, made: datetime) -> Calibration:
    """`setup`: of the cluster, uncorrected. All requests are simulated, so that those compared meet the load they met.
    Raises InputError if the recording does not tell the corrections, ConfigError as `simulate` does."""
    rows = measured_rows(trace)
    assert trace.measured is not None  # otherwise there are no such rows
    window = rows * WINDOWS // len(trace)
    fitted, held_out = rows[window % 2 == 1], rows[(window % 2 == 0) & (window > 0)]
    prompts_s = alone_s(trace, setup)
    has_fixed = tells_fixed_time(prompts_s[fitted])

    def predict(prefill: float, decode: float) -> MeasuredTimes:
        return simulated_times(trace, with_corrections(setup, Corrections(prefill, decode)))

    found = fit(Seen(trace.measured, trace.output_tokens, fitted), predict, has_fixed=has_fixed)
    before, after = predict(1.0, 1.0), simulated_times(trace, with_corrections(setup, found))
    check(found, trace, prompts_s, after, rows)
    judgement = judged(trace.measured, before, after, trace.output_tokens, held_out)
    batch = decode_batch(trace, trace.measured, rows, setup.decode.workers)
    return Calibration(
        tandem=tandem_version(),
        made=made,
        model=corrected.model,
        device=corrected.device,
        cost=corrected.cost,
        prefill_tp=None if setup.prefill is None else setup.prefill.tp,
        decode_tp=setup.decode.tp,
        prefill=found.prefill,
        decode=found.decode,
        fixed_s=found.fixed_s,
        load=_load(trace, trace.measured, batch),
        held_out=judgement,
        notes=tuple(notes_on(trace, rows, batch, found.fixed_s if has_fixed else None, judgement)),
    )


def with_corrections(setup: Setup, found: Corrections) -> Setup:
    def pool(base: PoolSetup) -> PoolSetup:
        return replace(base, cost=found.of(base.cost))

    prefill = None if setup.prefill is None else pool(setup.prefill)
    return replace(setup, prefill=prefill, decode=pool(setup.decode), fixed_s=found.fixed_s)


def _load(trace: TrafficTrace, measured: MeasuredTimes, batch: float) -> RecordedLoad:
    is_dated = measured.began_s >= _UNIX_S
    began, ended = (
        datetime.fromtimestamp(round(measured.began_s + since_s), UTC) if is_dated else None
        for since_s in (0.0, trace.span_s)
    )
    return RecordedLoad(
        began=began,
        ended=ended,
        requests=len(trace),
        requests_per_s=trace.requests_per_s,
        prompt_tokens=float(np.mean(trace.prompt_tokens)),
        output_tokens=float(np.mean(trace.output_tokens)),
        decode_batch=batch,
    )
