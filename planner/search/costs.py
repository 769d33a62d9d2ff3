"""What a layout costs while it serves a traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.search.evaluate import Evaluation
from planner.search.machines import MachineKinds
from planner.search.traffic import BUSIEST
from planner.traces.trace import TrafficTrace


@dataclass(frozen=True, slots=True)
class Rates:
    """`tokens_per_s`: of prompts and answers."""

    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float

    @classmethod
    def of(cls, trace: TrafficTrace) -> Rates:
        answers = float(trace.output_tokens.sum()) / trace.span_s
        return cls(trace.requests_per_s, float(trace.prompt_tokens.sum()) / trace.span_s + answers, answers)


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars for `devices` while they serve `what`: all of it by the tokens of prompts and answers, and all of it by
    those of answers alone; None: no token was served. `is_deployed`: on whole machines."""

    what: str
    devices: int
    requests_per_s: float
    tokens_per_s: float
    per_hour: float
    per_million_tokens: float | None
    per_million_output_tokens: float | None
    is_deployed: bool = False

    @classmethod
    def of(cls, what: str, devices: int, per_hour: float, rates: Rates, *, is_deployed: bool = False) -> Cost:
        def per_million(rate: float) -> float | None:
            return per_hour / (rate * 3600) * 1e6 if rate > 0 else None

        return cls(
            what,
            devices,
            rates.requests_per_s,
            rates.tokens_per_s,
            per_hour,
            per_million(rates.tokens_per_s),
            per_million(rates.output_tokens_per_s),
            is_deployed,
        )


COST_TITLES = ("cost of", "devices", "per hour", "per million tokens", "per million output tokens")


def money(value: float | None) -> str:
    return "–" if value is None else f"${value:.3f}"


def better_at_the_price(chosen: Evaluation, others: Sequence[Evaluation], machines: MachineKinds) -> list[Evaluation]:
    """Those with more requests within their objectives, on whole machines that cost the same."""
    price = machines.deployed_price(chosen.layout)
    return [
        each
        for each in others
        if round(each.joint, 3) > round(chosen.joint, 3) and machines.deployed_price(each.layout) == price
    ]


def costs_of(found: Evaluation, part: TrafficTrace, whole: TrafficTrace, machines: MachineKinds) -> tuple[Cost, ...]:
    """In the part that was simulated, at the rates of the simulation; over the whole trace, whose quiet hours are paid
    too; and as deployed, on whole machines if there are several."""
    devices, per_hour = found.layout.devices, replace(machines, are_whole=False).per_hour(found.layout)
    simulated, recorded = Rates(part.requests_per_s, found.tokens_per_s, found.output_tokens_per_s), Rates.of(whole)
    deployed = machines.deployed(found.layout)
    return (
        *((Cost.of(f"{BUSIEST} part", devices, per_hour, simulated),) if len(part) < len(whole) else ()),
        Cost.of("the whole trace", devices, per_hour, recorded),
        Cost.of("the whole trace, as deployed", deployed.devices, deployed.per_hour, recorded, is_deployed=True),
    )
