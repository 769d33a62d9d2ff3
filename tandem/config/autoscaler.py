"""Configuration of the autoscaler (`autoscaler`; docs/live-ratio.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen

Workers = Annotated[int, Field(ge=0, le=4096)]


class PoolLimits(Frozen):
    """Bounds on the number of workers of one role."""

    min: Workers | None = Field(None, description="Unset: 1, or 0 if the spec has no worker of this role.")
    max: Workers | None = Field(None, description="Unset: max_workers.")

    @model_validator(mode="after")
    def _in_order(self) -> PoolLimits:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"max: expected at least min ({self.min}), got {self.max}")
        return self


class AutoscalerSpec(Frozen):
    """Keeps predicted TTFT and TPOT within the objectives of `router.classes`. The limits apply to each model."""

    enabled: bool = Field(False, description="Start the autoscaler.")
    dry_run: bool = Field(False, description="Decide and log, but change nothing.")
    external: bool = Field(
        False,
        description="Another autoscaler sets the sizes of pools through the admin API: `tandem apply` sets only those "
        "that differ from the previous spec.",
    )
    interval_s: Annotated[float, Field(ge=0.1, le=600)] = Field(2.0, description="Time between two decisions.")
    min_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Both roles together; unset: the spec's number, so no worker is stopped."
    )
    max_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Both roles together; unset: the spec's number, so no worker is started."
    )
    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    headroom: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="Share of an objective above which a prediction calls for a change."
    )
    confirmations: Annotated[int, Field(ge=1, le=100)] = Field(
        2, description="Consecutive decisions that must agree before a change is made."
    )
    role_cooldown_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        10.0, description="Minimum time from any change to the next change of roles."
    )
    start_cooldown_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        60.0, description="Minimum time from any change to the start of a worker."
    )
    stop_after_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        300.0, description="A worker is stopped after it was not needed for this long, without any change meanwhile."
    )

    @property
    def owns_sizes(self) -> bool:
        """Whether pools have other sizes than the spec says, by the choice of this autoscaler or another."""
        return self.enabled or self.external

    @model_validator(mode="after")
    def _is_the_only_one(self) -> AutoscalerSpec:
        if self.enabled and self.external:
            raise ValueError(
                "external: expected false with autoscaler.enabled: two autoscalers would undo each other's changes; "
                "set one of them"
            )
        return self

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
