"""Where the phases of a plan stand under the roofline of their device (Williams et al., CACM 2009)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost import PrefillWork, RooflineCostModel
from planner.hardware import Hardware, RoleHardware
from planner.search.plan import Plan
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.text.words import plural

BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A step of one worker, for each of its devices: FLOPs for each byte, FLOPs in a second, and the shares of both
    peaks that it reaches, all-reduces and overheads included. Products of narrower formats, whose peak is higher, count
    as the 16-bit FLOPs that take as long."""

    phase: str
    what: str
    intensity: float
    flops_per_s: float
    mfu: float
    mbu: float


@dataclass(frozen=True, slots=True)
class RooflineChart:
    """Peaks of one device, in 16 bits. `mfu`, `mbu`: the shares of them that its kernels are taken to reach."""

    flops_per_s: float
    memory_bytes_per_s: float
    mfu: float
    mbu: float
    points: tuple[OperatingPoint, ...]

    @property
    def ridge(self) -> float:
        """FLOPs for each byte from which on arithmetic, not memory, is what takes the time."""
        return self.flops_per_s / self.memory_bytes_per_s


def rooflines_of(plan: Plan, hardware: RoleHardware, trace: TrafficTrace) -> tuple[RooflineChart, ...]:
    """Of the plan's layout, with prompts and contexts of the trace's mean lengths: one chart, or with a device for each
    role one of each, prefill first. Empty: there is no plan, or its step times are not a roofline's."""
    if plan.chosen is None:
        return ()
    layout = plan.chosen.layout
    prompt = max(1, round(float(trace.prompt_tokens.mean())))
    context = prompt + round(float(trace.output_tokens.mean()) / 2)
    prefill_tp = layout.decode_tp if layout.is_aggregated else layout.prefill_tp
    prefill = _roofline_cost(hardware.of(Role.PREFILL), prefill_tp)
    decode = _roofline_cost(hardware.of(Role.DECODE), layout.decode_tp)
    if prefill is None or decode is None:
        return ()
    chunk = min(prompt, layout.step_tokens)
    work = [PrefillWork(chunk, prompt - chunk)]
    prefill_point = _point("prefill", f"{chunk} tokens of a prompt", prefill, work, 0, context)
    most = min(hardware.of(Role.DECODE).kv_tokens(layout.decode_tp) // context, plan.goal.max_running_requests)
    decode_points = [_point("decode", plural(batch, "request"), decode, [], batch, context) for batch in _batches(most)]
    if hardware.is_mixed:
        return _chart(prefill, [prefill_point]), _chart(decode, decode_points)
    return (_chart(decode, [prefill_point, *decode_points]),)


def _roofline_cost(hardware: Hardware, tp: int) -> RooflineCostModel | None:
    cost = hardware.cost(tp)
    return cost if isinstance(cost, RooflineCostModel) else None


def _chart(cost: RooflineCostModel, points: Sequence[OperatingPoint]) -> RooflineChart:
    device = cost.device
    return RooflineChart(device.flops_per_s, device.memory_bytes_per_s, device.mfu, device.mbu, tuple(points))


def _batches(most: int) -> Iterator[int]:
    """Ends with the most that a worker runs."""
    yield from (batch for batch in BATCHES if batch < most)
    yield max(1, most)


def _point(
    phase: str, what: str, cost: RooflineCostModel, prefills: Sequence[PrefillWork], batch: int, context: int
) -> OperatingPoint:
    work, device = cost.work(prefills, batch, batch * context), cost.device
    each_s = cost.step_s(prefills, batch, batch * context) * cost.tp  # device seconds
    peak, moved = device.flops_per_s, work.moved_bytes + work.expert_bytes
    flops = work.attention + work.products * peak / (device.weight_flops_per_s or peak)
    flops += work.expert_flops * peak / (device.expert_flops_per_s or peak)
    mbu = moved / each_s / device.memory_bytes_per_s
    return OperatingPoint(phase, what, flops / moved, flops / each_s, flops / each_s / peak, mbu)
