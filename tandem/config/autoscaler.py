"""The part of the configuration that says how the pools follow the traffic (`autoscaler`; docs/live-ratio.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen

Workers = Annotated[int, Field(ge=0, le=4096)]


class PoolLimits(Frozen):
    """How many workers of one role there may be."""

    min: Workers | None = Field(None, description="Unset: 1, or 0 where the spec has none of this role.")
    max: Workers | None = Field(None, description="Unset: as many as there may be in all.")

    @model_validator(mode="after")
    def _in_order(self) -> PoolLimits:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"max: expected at least min ({self.min}), got {self.max}")
        return self


class AutoscalerSpec(Frozen):
    """Keeps predicted TTFT and TPOT within the objectives of `router.classes`. The limits hold for each model."""

    enabled: bool = False
    dry_run: bool = Field(False, description="Decide, log and show, but change nothing.")
    interval_s: Annotated[float, Field(ge=0.1, le=600)] = Field(2.0, description="Between two looks at the cluster.")
    min_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Of both roles together; unset: as many as the spec has, so that none is stopped."
    )
    max_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Of both roles together; unset: as many as the spec has, so that none is started."
    )
    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    headroom: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="A prediction beyond this share of an objective asks for a change."
    )
    confirmations: Annotated[int, Field(ge=1, le=100)] = Field(
        2, description="So many looks in a row must ask for the same before it is done."
    )
    role_cooldown_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        10.0, description="After any change, before roles change again."
    )
    start_cooldown_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        60.0, description="After any change, before a worker is started."
    )
    stop_after_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        300.0, description="A worker is stopped when it was not needed for so long, and nothing changed meanwhile."
    )

    @model_validator(mode="after")
    def _limits_fit(self) -> AutoscalerSpec:
        if self.min_workers is not None and self.max_workers is not None and self.min_workers > self.max_workers:
            raise ValueError(f"max_workers: expected at least min_workers ({self.min_workers}), got {self.max_workers}")
        if self.decode.max == 0 or self.decode.min == 0:
            raise ValueError("decode: expected limits of at least 1, got 0")
        least = (self.prefill.min or 0) + (self.decode.min or 1)
        if self.max_workers is not None and least > self.max_workers:
            raise ValueError(
                f"max_workers: expected at least prefill.min + decode.min ({least}), got {self.max_workers}"
            )
        return self
