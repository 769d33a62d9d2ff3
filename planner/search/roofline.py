"""Where the phases of a plan stand under its device's roofline (Williams et al., CACM 2009)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost import PrefillWork, RooflineCostModel, StepLoad
from planner.hardware import Hardware
from planner.search.plan import Plan
from planner.traces.trace import TrafficTrace
from tandem.text.words import plural

BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A step of one worker, for each of its devices: FLOPs for each byte, FLOPs in a second, and the shares of both
    peaks that it reaches, all-reduces and overheads included."""

    phase: str
    what: str
    intensity: float
    flops_per_s: float
    mfu: float
    mbu: float


@dataclass(frozen=True, slots=True)
class RooflineChart:
    """Peaks of one device. `mfu`, `mbu`: the shares of them that its kernels are taken to reach."""

    flops_per_s: float
    memory_bytes_per_s: float
    mfu: float
    mbu: float
    points: tuple[OperatingPoint, ...]

    @property
    def ridge(self) -> float:
        """FLOPs for each byte from which on arithmetic, not memory, is what takes the time."""
        return self.flops_per_s / self.memory_bytes_per_s


def roofline_of(plan: Plan, hardware: Hardware, trace: TrafficTrace) -> RooflineChart | None:
    """Of the plan's layout, with prompts and contexts of the trace's mean lengths. None: there is no plan, or its step
    times are not a roofline's."""
    if plan.chosen is None:
        return None
    layout = plan.chosen.layout
    prompt = max(1, round(float(trace.prompt_tokens.mean())))
    context = prompt + round(float(trace.output_tokens.mean()) / 2)
    first = layout.decode_tp if layout.is_aggregated else layout.prefill_tp
    costs = [hardware.cost(tp) for tp in (first, layout.decode_tp)]
    prefill, decode = (each if isinstance(each, RooflineCostModel) else None for each in costs)
    if prefill is None or decode is None:
        return None
    chunk = min(prompt, layout.step_tokens)
    steps = [("prefill", f"{chunk} tokens of a prompt", prefill, [PrefillWork(chunk, prompt - chunk)], 0)]
    most = hardware.kv_tokens(layout.decode_tp) // context
    steps += [("decode", plural(batch, "request"), decode, [], batch) for batch in _batches(most)]
    device = decode.device
    return RooflineChart(
        device.weight_flops_per_s or device.flops_per_s, device.memory_bytes_per_s, device.mfu, device.mbu,
        tuple(_point(phase, what, cost, prefills, batch, context) for phase, what, cost, prefills, batch in steps),
    )  # fmt: skip


def _batches(most: int) -> Iterator[int]:
    """Ends with what the KV pool holds."""
    yield from (batch for batch in BATCHES if batch < most)
    yield max(1, most)


def _point(
    phase: str, what: str, cost: RooflineCostModel, prefills: Sequence[PrefillWork], batch: int, context: int
) -> OperatingPoint:
    work: StepLoad = cost.work(prefills, batch, batch * context)
    each_s = cost.step_s(prefills, batch, batch * context) * cost.tp  # device seconds
    flops_per_s, bytes_per_s = work.flops / each_s, (work.moved_bytes + work.expert_bytes) / each_s
    peak = cost.device.weight_flops_per_s or cost.device.flops_per_s
    return OperatingPoint(
        phase, what, work.intensity, flops_per_s, flops_per_s / peak, bytes_per_s / cost.device.memory_bytes_per_s
    )
