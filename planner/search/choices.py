"""The same traffic and goal on several models of device, or pairs of them: a plan for each, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.hardware import RoleHardware
from planner.search.goal import Goal
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.trials import SearchProgress
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.errors import ConfigError

PlanMaker = Callable[[TrafficTrace, RoleHardware, Goal, SearchOptions, SearchProgress], Plan]


@dataclass(frozen=True, slots=True)
class Choice:
    """`plan` None: the model does not fit on so many devices, as `why_not` says. `load`: the largest that meets the
    goal; None: it was not looked for, or there is none."""

    hardware: RoleHardware
    plan: Plan | None
    why_not: str = ""
    load: float | None = None

    @property
    def per_hour(self) -> float:
        """Dollars; infinite if nothing meets the goal."""
        if self.plan is None or self.plan.chosen is None:
            return math.inf
        return self.plan.per_hour(self.plan.chosen.layout)

    @property
    def closest(self) -> float:
        """The share of requests within their objectives that a layout came closest with."""
        finalists = () if self.plan is None else self.plan.finalists
        return max((each.joint for each in finalists if each.complete), default=0.0)

    def to_json(self) -> dict[str, Any]:
        chosen = None if self.plan is None else self.plan.chosen
        miss = None if self.plan is None else self.plan.miss
        return {
            "device": self.hardware.name,
            "layout": None if chosen is None else chosen.layout.to_json(),
            "devices": None if chosen is None else chosen.layout.devices,
            "per_hour": None if chosen is None else self.per_hour,
            "why_not": self.why_not if miss is None else miss.explanation,
            **({} if self.load is None else {"load": self.load}),
        }


def plan_on_each(
    trace: TrafficTrace,
    candidates: Sequence[RoleHardware],
    goal: Goal,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
    make: PlanMaker = make_plan,
) -> list[Choice]:
    """The cheapest first; if `make` plans for the largest load, the one with the largest. Raises ConfigError if the
    model fits on none or one of several devices has no price, InputError when the trace has no rate."""
    if len(candidates) > 1:
        for device in (hardware.of(role).device for hardware in candidates for role in Role):
            if not device.price_per_hour:
                raise ConfigError(
                    f"--device: {device.name}: price_per_hour: expected a price to compare devices by, got 0; set it "
                    "in its file or with --price",
                    field="price_per_hour",
                )
    found: list[Choice] = []
    errors: list[ConfigError] = []
    for hardware in candidates:
        name = f"{hardware.name}: " if len(candidates) > 1 else ""

        def report(what: str, done: int, total: int, name: str = name) -> None:
            progress(name + what, done, total)

        try:
            plan = make(trace, hardware, goal, options, report)
            found.append(Choice(hardware, plan, load=None if plan.headroom is None else plan.headroom.load))
        except ConfigError as error:
            errors.append(error)
            found.append(Choice(hardware, None, error.message))
    if len(errors) == len(candidates):
        raise errors[0]
    return sorted(
        found, key=lambda choice: (-(choice.load or 0.0), choice.per_hour, choice.plan is None, -choice.closest)
    )
