"""What a plan must reach."""

from __future__ import annotations

from dataclasses import dataclass

from planner.simulator.setup import Slo
from tandem.config.engine import MAX_LONGEST_STEP_S
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Goal:
    """`attainment`: the share of requests that must meet both objectives. `confidence`: the share of resampled
    traces for which they must too. `bounds_steps`: steps with prompts and answers aim at the TPOT objective
    (engine.longest_step_s). `whole_machines`: layouts are ordered by what they cost as deployed."""

    slo: Slo
    attainment: float = 0.95
    max_devices: int = 16
    step_tokens: tuple[int, ...] = (2048, 8192)
    max_running_requests: int = 256
    confidence: float = 0.0
    bounds_steps: bool = False
    whole_machines: bool = False

    @property
    def longest_step_s(self) -> float | None:
        """engine.longest_step_s of a plan."""
        return self.slo.tpot_s if self.bounds_steps else None

    def __post_init__(self) -> None:
        if not (self.slo.has_ttft or self.slo.has_tpot):
            raise ConfigError(
                "--ttft: expected an objective, got neither --ttft nor --tpot: give one or both", field="--ttft"
            )
        if not 0 < self.attainment < 1:
            raise ConfigError(
                f"--attainment: expected a share above 0 and below 1, got {self.attainment:g}", field="--attainment"
            )
        if not 0 <= self.confidence <= 1:
            raise ConfigError(
                f"--confidence: expected a share from 0 to 1, got {self.confidence:g}", field="--confidence"
            )
        if self.bounds_steps and not 0 < (self.slo.tpot_s or 0.0) <= MAX_LONGEST_STEP_S:
            got = "none" if self.slo.tpot_s is None else f"{self.slo.tpot_s:g}"
            raise ConfigError(
                f"--bounded-steps: expected --tpot with it, of at most {MAX_LONGEST_STEP_S} s: so long a step may be; "
                f"got {got}",
                field="--tpot",
            )
        if self.max_devices < 1:
            raise ConfigError(f"--devices: expected at least 1, got {self.max_devices}", field="--devices")
