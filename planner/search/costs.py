"""What a layout costs while it serves a traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.devices import DeviceSpec
from planner.search.evaluate import Evaluation
from planner.search.layout import ClusterLayout, Machines
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
    def of(cls, what: str, devices: int, price_per_hour: float, rates: Rates, *, is_deployed: bool = False) -> Cost:
        per_hour = devices * price_per_hour

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


@dataclass(frozen=True, slots=True)
class Deployed:
    """A layout on whole machines."""

    machines: int
    devices: int
    per_hour: float

    @classmethod
    def of(cls, layout: ClusterLayout, devices_per_node: int, price_per_hour: float) -> Deployed:
        machines = Machines.of(layout, devices_per_node)
        return cls(machines.count, machines.all_devices, machines.all_devices * price_per_hour)

    def __str__(self) -> str:
        return f"{self.devices}, ${self.per_hour:.2f}"


def better_at_the_price(chosen: Evaluation, others: Sequence[Evaluation], devices_per_node: int) -> list[Evaluation]:
    """Those with more requests within their objectives, on whole machines that cost the same."""
    devices = Machines.of(chosen.layout, devices_per_node).all_devices
    return [
        each
        for each in others
        if round(each.joint, 3) > round(chosen.joint, 3)
        and Machines.of(each.layout, devices_per_node).all_devices == devices
    ]


def costs_of(found: Evaluation, part: TrafficTrace, whole: TrafficTrace, device: DeviceSpec) -> tuple[Cost, ...]:
    """In the part that was simulated, at the rates of the simulation; over the whole trace, whose quiet hours are paid
    too; and as deployed, on whole machines if there are several."""
    devices, price = found.layout.devices, device.price_per_hour
    simulated, recorded = Rates(part.requests_per_s, found.tokens_per_s, found.output_tokens_per_s), Rates.of(whole)
    deployed = Deployed.of(found.layout, device.devices_per_node, price)
    return (
        *((Cost.of(f"{BUSIEST} part", devices, price, simulated),) if len(part) < len(whole) else ()),
        Cost.of("the whole trace", devices, price, recorded),
        Cost.of("the whole trace, as deployed", deployed.devices, price, recorded, is_deployed=True),
    )
