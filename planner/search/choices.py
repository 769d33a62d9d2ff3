"""The same traffic and goal on several models of device: a plan for each, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.hardware import Hardware
from planner.search.goal import Goal
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.trials import SearchProgress
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """`plan` None: the model does not fit on so many devices, as `why_not` says."""

    hardware: Hardware
    plan: Plan | None
    why_not: str = ""

    @property
    def per_hour(self) -> float:
        """Dollars; infinite if nothing meets the goal."""
        if self.plan is None or self.plan.chosen is None:
            return math.inf
        return self.plan.chosen.layout.devices * self.plan.price_per_hour

    def to_json(self) -> dict[str, Any]:
        chosen = None if self.plan is None else self.plan.chosen
        miss = None if self.plan is None else self.plan.miss
        return {
            "device": self.hardware.device.name,
            "layout": None if chosen is None else chosen.layout.to_json(),
            "devices": None if chosen is None else chosen.layout.devices,
            "per_hour": None if chosen is None else self.per_hour,
            "why_not": self.why_not if miss is None else miss.explanation,
        }


def plan_on_each(
    trace: TrafficTrace,
    candidates: Sequence[Hardware],
    goal: Goal,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
) -> list[Choice]:
    """Raises ConfigError if the model fits on none or one of several devices has no price, InputError when the trace
    has no rate."""
    for hardware in candidates:
        if len(candidates) > 1 and not hardware.device.price_per_hour:
            raise ConfigError(
                f"--device: {hardware.device.name}: price_per_hour: expected a price to compare devices by, got 0",
                field="price_per_hour",
            )
    found: list[Choice] = []
    errors: list[ConfigError] = []
    for hardware in candidates:
        name = f"{hardware.device.name}: " if len(candidates) > 1 else ""

        def report(what: str, done: int, total: int, name: str = name) -> None:
            progress(name + what, done, total)

        try:
            found.append(Choice(hardware, make_plan(trace, hardware, goal, options, report)))
        except ConfigError as error:
            errors.append(error)
            found.append(Choice(hardware, None, error.message))
    if len(errors) == len(candidates):
        raise errors[0]
    return sorted(found, key=lambda choice: (choice.per_hour, choice.plan is None))
