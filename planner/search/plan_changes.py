"""What changed between two plans, of the JSON of `tandem plan`: what was asked, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.compare import MetricRow, Unit
from planner.search.layout import ClusterLayout

NOTHING = "nothing meets the goal"
_CHOSEN = {
    "joint": ("within objectives", Unit.SHARE),
    "goodput_per_s": ("goodput", Unit.PER_SECOND),
    "ttft_p90_s": ("TTFT p90", Unit.SECONDS),
    "tpot_p90_s": ("TPOT p90", Unit.SECONDS),
}


def is_plan(found: object) -> bool:
    """Whether `found` is JSON of `tandem plan`."""
    if not isinstance(found, dict) or not isinstance(found.get("goal"), dict):
        return False
    return "chosen" in found and all(isinstance(found.get(name), list) for name in ("costs", "finalists", "variants"))


@dataclass(frozen=True, slots=True)
class PlanChanges:
    """Between plans A and B. `asked`: what differs of the questions, with the answers of both. `layouts`: those chosen.
    `conditions`: the shares of requests within their objectives under other conditions, as of `rows`."""

    asked: tuple[tuple[str, str, str], ...]
    layouts: tuple[str, str]
    rows: tuple[MetricRow, ...]
    conditions: tuple[MetricRow, ...]

    @classmethod
    def between(cls, a: Mapping[str, Any], b: Mapping[str, Any]) -> PlanChanges:
        return cls(tuple(_asked(a, b)), (layout_of(a), layout_of(b)), tuple(_figures(a, b)), tuple(_conditions(a, b)))

    def to_json(self) -> dict[str, Any]:
        """As `tandem compare --json` of two results."""
        fields = asdict(self) | {"layouts": dict(zip("ab", self.layouts, strict=True))}
        fields["asked"] = [dict(zip(("what", "a", "b"), each, strict=True)) for each in self.asked]
        return fields | {name: [row.to_json() for row in getattr(self, name)] for name in ("rows", "conditions")}


def layout_of(plan: Mapping[str, Any]) -> str:
    """With its device."""
    chosen = plan.get("chosen")
    return NOTHING if chosen is None else f"{layout_in(chosen)} on {plan.get('device')}"


def layout_in(found: Mapping[str, Any]) -> ClusterLayout:
    """Of an evaluation."""
    return ClusterLayout(**found["job"]["layout"])


def _asked(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for (what, first), (_, second) in zip(_questions(a), _questions(b), strict=True):
        if first != second:
            yield what, first, second


def _questions(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    goal = plan["goal"]
    slo = goal.get("slo") or {}
    yield "model", str(plan.get("model"))
    yield "device", str(plan.get("device"))
    yield "traffic", str((plan.get("traffic") or ["unknown"])[0])
    yield "load", f"{plan.get('requests_per_s', 0.0):.2f} requests/s"
    yield "TTFT objective", _seconds(slo.get("ttft_s"))
    yield "TPOT objective", _seconds(slo.get("tpot_s"))
    yield "objectives of classes", ", ".join(str(each) for each in slo.get("of_class") or ()) or "none"
    yield "share that must meet them", f"{goal.get('attainment', 0.0):.1%}"
    yield "confidence", f"{goal.get('confidence', 0.0):g}"
    yield "devices, at most", str(goal.get("max_devices"))
    yield "price per device and hour", _prices(plan)
    yield "whole machines", _yes(goal.get("whole_machines"))
    yield "tokens of a step, at most", ", ".join(map(str, goal.get("step_tokens") or ())) or "unknown"
    yield "bounded steps", _yes(goal.get("bounds_steps"))
    yield "running requests of a worker, at most", str(goal.get("max_running_requests"))
    yield "step times", str(plan.get("cost_model"))


def _prices(plan: Mapping[str, Any]) -> str:
    """Of the plan's device, or of each role's."""
    of_role: Mapping[str, Mapping[str, Any]] = plan.get("of_role") or {"": plan}
    return ", ".join(f"{role} ${each.get('price_per_hour', 0.0):g}".strip() for role, each in of_role.items())


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


def _figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[MetricRow]:
    first, second = (dict(plan.get("chosen") or {}) for plan in (a, b))
    costs: list[dict[str, dict[str, Any]]] = [{each["what"]: each for each in plan["costs"]} for plan in (a, b)]
    whats = dict.fromkeys(what for each in costs for what in each)
    devices = [next(iter(each.values()), {}).get("devices") for each in costs]
    yield MetricRow("devices", Unit.COUNT, *devices)
    deployed = [(chosen.get("deployed") or {}) for chosen in (first, second)]
    yield MetricRow("devices, as deployed", Unit.COUNT, *(each.get("devices") for each in deployed))
    for what in whats:
        found = [each.get(what, {}) for each in costs]
        yield MetricRow(f"per hour, {what}", Unit.DOLLARS, *(each.get("per_hour") for each in found))
        yield MetricRow(
            f"per million tokens, {what}", Unit.DOLLARS, *(each.get("per_million_tokens") for each in found)
        )
    for name, (title, unit) in _CHOSEN.items():
        yield MetricRow(title, unit, first.get(name), second.get(name))


def _conditions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[MetricRow]:
    shares = [dict(_shares(plan)) for plan in (a, b)]
    for name in dict.fromkeys(name for each in shares for name in each):
        yield MetricRow(name, Unit.SHARE, *(each.get(name) for each in shares))


def _shares(plan: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    chosen = plan.get("chosen")
    if chosen is None:
        return
    yield "as planned", chosen["joint"]
    of_chosen: Sequence[Mapping[str, Any]] = [
        each for each in plan.get("resampled") or () if each["layout"] == chosen["job"]["layout"]
    ]
    for each in of_chosen:
        yield "resampled traces, second worst", each["low"]
    for each in plan["variants"]:
        found = each.get("evaluation")
        name = "steps slower, as far as they may be" if each["name"].startswith("steps ") else each["name"]
        yield name, 0.0 if found is None else found["joint"]
