"""A calibration as a file: the corrections, their error on requests that they were not fitted to, and what they hold
for."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from planner.cost import Corrections
from tandem.config.frozen import Frozen
from tandem.errors import ConfigError

MAX_BYTES = 1 << 20
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Figure(Frozen):
    """One percentile over the requests that were held out, in seconds. `before_s` None: not one finished in the
    uncorrected simulation. `low`, `high`: the corrected prediction relative to the measurement, less 1 (bootstrap, 90 %
    of the draws)."""

    metric: str
    percentile: str
    measured_s: Amount
    before_s: Amount | None
    after_s: Amount
    low: float
    high: float


class HeldOut(Frozen):
    """Means of the figures' relative errors: the larger of TTFT's and TPOT's. `low`, `high`: of `error` (bootstrap,
    90 % of the draws)."""

    requests: int
    error: Amount
    low: Amount
    high: Amount
    error_before: Amount | None
    figures: tuple[Figure, ...]


class RecordedLoad(Frozen):
    """`decode_batch`: requests that decode together on a worker, at most, for nine in ten requests."""

    began: datetime | None
    ended: datetime | None
    requests: int
    requests_per_s: Amount
    prompt_tokens: Amount
    output_tokens: Amount
    decode_batch: Amount


class Calibration(Frozen):
    """`cost`: digest of the cost model that is corrected. `prefill_tp` None: an aggregated cluster."""

    tandem: str
    made: datetime
    model: str
    device: str
    cost: str
    prefill_tp: int | None
    decode_tp: int
    prefill: Factor
    decode: Factor
    fixed_s: Amount
    load: RecordedLoad
    held_out: HeldOut
    notes: tuple[str, ...] = ()

    @property
    def corrections(self) -> Corrections:
        return Corrections(self.prefill, self.decode, self.fixed_s)

    @property
    def widths(self) -> set[int]:
        return {self.decode_tp} if self.prefill_tp is None else {self.prefill_tp, self.decode_tp}

    @property
    def error(self) -> float:
        return self.held_out.error

    def __str__(self) -> str:
        held_out = self.held_out
        day = "" if self.load.ended is None else f" of {self.load.ended:%Y-%m-%d}"
        return (
            f"calibrated with {self.load.requests} requests{day}: prefill x {self.prefill:.2f}, decode x "
            f"{self.decode:.2f}, {1000 * self.fixed_s:.0f} ms before the first token; {held_out.error:.0%} off on "
            f"average on {held_out.requests} that were held out ({held_out.low:.0%} to {held_out.high:.0%})"
        )

    def notes_for(self, widths: set[int]) -> tuple[str, ...]:
        """For workers so wide."""
        if beyond := sorted(widths - self.widths):
            had, others = (", ".join(map(str, each)) for each in (sorted(self.widths), beyond))
            return (*self.notes, f"calibrated at TP {had}: for TP {others} the same factors are an assumption")
        return self.notes


def write_calibration(found: Calibration, path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror}", field="--output") from None


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return Calibration.model_validate_json(file.read(MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"--calibration: {path}: {error.strerror}", field="--calibration") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            f"--calibration: {path}: expected a file of `tandem calibrate`: {where}: {first['msg']}",
            field="--calibration",
        ) from None
