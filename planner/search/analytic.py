"""Bounds on a layout without a simulation: queues, bursts and cold caches can only make it worse.

A layout that fails here fails in every simulation. The others are ranked by how close they are to their limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from planner.cost import CostModel
from planner.hardware import Hardware
from planner.search.layout import ClusterLayout
from planner.search.traffic import TrafficShape
from planner.simulator.setup import Slo

_ROUNDS = 40
TOLERANCE = 1.05  # the bounds are means, not percentiles: a layout slightly above a limit may still meet it


class Limit(StrEnum):
    PREFILL_TIME = "prefill_time"  # an idle worker's time for a long prompt, over the TTFT objective
    PREFILL_LOAD = "prefill_load"  # prefill time needed, over the time of the workers
    DECODE_STEP = "decode_step"  # the mean step, over the TPOT objective
    DECODE_LOAD = "decode_load"  # requests that decode at a time, over max_running_requests
    KV_MEMORY = "kv_memory"  # their KV, over the pool
    PROMPT_MEMORY = "prompt_memory"  # the KV of a long prompt, over one worker's pool


MEANING: Mapping[Limit, str] = MappingProxyType(
    {
        Limit.PREFILL_TIME: "the prefill of a long prompt on an idle worker (limit: the TTFT objective)",
        Limit.PREFILL_LOAD: "the prefill of all prompts",
        Limit.DECODE_STEP: "the mean decode step (limit: the TPOT objective)",
        Limit.DECODE_LOAD: "the number of requests that decode at a time",
        Limit.KV_MEMORY: "the KV of the running requests",
        Limit.PROMPT_MEMORY: "the KV of the longest prompt",
    }
)
"""The subject of a sentence about the limit that binds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The use of each limit; 1 is at the limit. `worst`: the limit that binds."""

    use: dict[Limit, float]

    @property
    def worst(self) -> tuple[Limit, float]:
        return max(self.use.items(), key=lambda item: item[1])

    @property
    def possible(self) -> bool:
        return self.worst[1] <= TOLERANCE


class Analysis:
    """Bounds for one traffic on one hardware. Caches the cost models by width."""

    def __init__(
        self, shape: TrafficShape, hardware: Hardware, slo: Slo, attainment: float, max_running_requests: int
    ) -> None:
        self._shape, self._hardware, self._slo = shape, hardware, slo
        self._attainment, self._max_running = attainment, max_running_requests
        self._prefill: dict[tuple[int, int], float] = {}
        self._costs: dict[int, CostModel] = {}

    def possible(self, candidates: Iterable[ClusterLayout]) -> list[tuple[float, ClusterLayout]]:
        """The layouts that may meet the objectives, each with the use of the limit that binds, best first."""
        found = [(self.bounds(each), each) for each in candidates]
        return sorted((bounds.worst[1], layout) for bounds, layout in found if bounds.possible)

    def bounds(self, layout: ClusterLayout) -> Bounds:
        shape = self._shape
        prefill_tp = layout.decode_tp if layout.is_aggregated else layout.prefill_tp
        prefillers = layout.decode_workers if layout.is_aggregated else layout.prefill_workers
        prefill_load = shape.requests_per_s * self._mean_prefill_s(prefill_tp, layout.step_tokens) / prefillers
        use = {Limit.PREFILL_LOAD: prefill_load} | self._decode_use(layout, prefill_load)
        if self._slo.ttft_s is not None:
            # The uncached part of the prompt at the attainment quantile, on an otherwise idle worker.
            tokens = shape.prompt_at(self._attainment) * shape.uncached
            use[Limit.PREFILL_TIME] = (
                prompt_s(self._cost(prefill_tp), round(tokens), layout.step_tokens) / self._slo.ttft_s
            )
        rank_bytes = self._hardware.kv_rank_bytes(*layout.widths)
        pools = [self._hardware.kv_tokens(tp, rank_bytes) for tp in layout.widths]
        use[Limit.PROMPT_MEMORY] = max(shape.prompt_at(self._attainment) / max(1, pool) for pool in pools)
        return Bounds(use)

    def _decode_use(self, layout: ClusterLayout, prefill_load: float) -> dict[Limit, float]:
        """Finds the batch B = token rate · step time(B), iterating from below."""
        shape, cost = self._shape, self._cost(layout.decode_tp)
        tokens_per_s = shape.requests_per_s * shape.mean_output / layout.decode_workers
        context = shape.mean_prompt + shape.mean_output / 2
        # Prefill on the same worker takes time from decoding.
        stretch = 1.0 / max(0.02, 1.0 - prefill_load) if layout.is_aggregated else 1.0
        batch, step_s = 1.0, 0.0
        for _ in range(_ROUNDS):
            count = max(1, round(batch))
            step_s = cost.decode_step_s(count, round(count * context)) * stretch
            batch = min(max(1.0, tokens_per_s * step_s), 4.0 * self._max_running)
        use = {
            Limit.DECODE_LOAD: batch / self._max_running,
            Limit.KV_MEMORY: batch * context / max(1, self._decode_kv_tokens(layout)),
        }
        if self._slo.tpot_s is not None:
            use[Limit.DECODE_STEP] = step_s / self._slo.tpot_s
        return use

    def _decode_kv_tokens(self, layout: ClusterLayout) -> int:
        return self._hardware.kv_tokens(layout.decode_tp, self._hardware.kv_rank_bytes(*layout.widths))

    def _mean_prefill_s(self, tp: int, step_tokens: int) -> float:
        known = self._prefill.get((tp, step_tokens))
        if known is None:
            cost, shape = self._cost(tp), self._shape
            times = [prompt_s(cost, max(1, round(each * shape.uncached)), step_tokens) for each in shape.prompts]
            known = self._prefill[tp, step_tokens] = sum(times) / len(times)
        return known

    def _cost(self, tp: int) -> CostModel:
        if tp not in self._costs:
            self._costs[tp] = self._hardware.cost(tp)
        return self._costs[tp]


def prompt_s(cost: CostModel, tokens: int, step_tokens: int) -> float:
    """Time to prefill one prompt alone, in chunks of `step_tokens`."""
    return sum(cost.prefill_s(min(step_tokens, tokens - start), start) for start in range(0, tokens, step_tokens))
