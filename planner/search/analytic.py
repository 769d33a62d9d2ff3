"""Bounds on a layout without a simulation: queues, bursts and cold caches can only make it worse.

What they rule out fails in every simulation. As many requests as the goal allows may miss their objectives, those that
cost the most; the others must be served between the first arrival and the last one's objectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, PrefillWork
from planner.hardware import RoleHardware
from planner.search.layout import ClusterLayout
from planner.shapes import ModelShape
from planner.simulator.setup import Slo
from planner.traces.context import too_long
from planner.traces.hits import cached_tokens
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role

TOLERANCE = 1.05  # contexts are means of requests that may be served
SMALL_PROMPTS = (16, 128)  # tokens of prompts that share a step: attention costs them next to nothing


class Limit(StrEnum):
    PREFILL_TIME = "prefill_time"  # an idle worker's time for a long prompt, over the TTFT objective
    PREFILL_LOAD = "prefill_load"  # prefill time needed, over the time of the workers
    DECODE_STEP = "decode_step"  # a step of one request, over the TPOT objective
    DECODE_LOAD = "decode_load"  # tokens a second, over those of the largest batches within the TPOT objective
    KV_MEMORY = "kv_memory"  # the same, where the KV pool limits the batches
    PROMPT_MEMORY = "prompt_memory"  # the KV of a long prompt, over one worker's pool
    CONTEXT = "context"  # prompts beyond the model's context, over the requests that may miss


MEANING: Mapping[Limit, str] = MappingProxyType(
    {
        Limit.PREFILL_TIME: "the prefill of a long prompt on an idle worker (limit: the TTFT objective)",
        Limit.PREFILL_LOAD: "the prefill of all prompts",
        Limit.DECODE_STEP: "a decode step (limit: the TPOT objective)",
        Limit.DECODE_LOAD: "the decoding of all answers",
        Limit.KV_MEMORY: "the KV of the running requests",
        Limit.PROMPT_MEMORY: "the KV of the longest prompt",
        Limit.CONTEXT: "the number of prompts beyond the model's context (limit: the requests that may miss)",
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
    """Bounds for one traffic on one hardware."""

    def __init__(
        self, trace: TrafficTrace, hardware: RoleHardware, slo: Slo, attainment: float, max_running_requests: int
    ) -> None:
        self._hardware, self._slo, self._max_running = hardware, slo, max_running_requests
        self._span_s = trace.span_s
        self._most_misses = allowed_misses(attainment, len(trace))
        self._refused = too_long(trace, hardware.model.context_tokens)
        uncached = np.maximum(1, trace.prompt_tokens - cached_tokens(trace))
        decoded = trace.output_tokens - 1  # prefill brings the first token
        own = uncached + trace.output_tokens / 2
        self._long_uncached = int(self._at_limit(uncached))
        self._prefill_tokens = float(self._cheapest(uncached).sum())
        self._decoded_tokens = float(self._cheapest(decoded).sum())
        shape = hardware.model.shape
        seen, self._own_context = (  # by a token that is decoded; what is not shared of its request
            float(self._cheapest(decoded * each).sum()) / max(1.0, float(decoded.sum()))
            for each in (seen_tokens(trace, shape), own)
        )
        self._context = shape.context_of(seen)
        self._longest = self._at_limit(trace.prompt_tokens + trace.output_tokens)
        self._tpot_slack_s = (slo.tpot_s or 0.0) * float(decoded.max())
        self._cost = cache(lambda role, tp: hardware.of(role).cost(tp))
        self._prefill_rate = cache(self._tokens_per_s)
        self._decode_rate = cache(self._decode_tokens_per_s)
        self._alone_s = cache(self._prompt_alone_s)

    def possible(self, candidates: Iterable[ClusterLayout]) -> list[ClusterLayout]:
        """The layouts that may meet the objectives."""
        return [each for each in candidates if self.bounds(each).possible]

    def bounds(self, layout: ClusterLayout) -> Bounds:
        """Decode workers may prefill too, as the router decides."""
        ttft_s, tpot_s = self._slo.ttft_s, self._slo.tpot_s
        limit, decode_rate = self._decode_rate(layout.decode_tp)
        decode, step_tokens = self._hardware.of(Role.DECODE), layout.step_tokens
        use = {Limit.PROMPT_MEMORY: self._longest / max(1, decode.kv_tokens(layout.decode_tp))}
        if self._refused:
            use[Limit.CONTEXT] = self._refused / max(1, self._most_misses)
        if ttft_s is not None:
            alone_s = min(self._alone_s(role, tp, step_tokens) for role, tp in layout.widths)
            use[Limit.PREFILL_TIME] = alone_s / ttft_s
            rate = layout.decode_workers * self._prefill_rate(Role.DECODE, layout.decode_tp, step_tokens)
            if not layout.is_aggregated:
                rate += layout.prefill_workers * self._prefill_rate(Role.PREFILL, layout.prefill_tp, step_tokens)
            use[Limit.PREFILL_LOAD] = self._prefill_tokens / (rate * (self._span_s + ttft_s))
        if tpot_s is not None and self._decoded_tokens:
            step_s = self._cost(Role.DECODE, layout.decode_tp).decode_step_s(1, 1)
            use[Limit.DECODE_STEP] = step_s / (tpot_s * self._most_per_step)
        if ttft_s is not None and tpot_s is not None:
            seconds = self._span_s + ttft_s + self._tpot_slack_s
            use[limit] = self._decoded_tokens / (layout.decode_workers * seconds * decode_rate)
        return Bounds(use)

    def fastest(self) -> tuple[int, int]:
        """The widths of the workers that prefill a long prompt and decode a batch first."""
        tokens, batch_context = self._long_uncached, round(32 * self._context)

        def prefill_s(tp: int) -> float:
            return prompt_s(self._cost(Role.PREFILL, tp), tokens, tokens)

        def decode_s(tp: int) -> float:
            return self._cost(Role.DECODE, tp).decode_step_s(32, batch_context)

        prefill, decode = (self._hardware.of(role).widths() for role in (Role.PREFILL, Role.DECODE))
        return min(prefill, key=prefill_s), min(decode, key=decode_s)

    @property
    def _most_per_step(self) -> float:
        acceptance = self._hardware.of(Role.DECODE).acceptance
        return 1.0 if acceptance is None else acceptance.tokens + 1.0

    def _prompt_alone_s(self, role: Role, tp: int, step_tokens: int) -> float:
        return prompt_s(self._cost(role, tp), self._long_uncached, step_tokens)

    def _tokens_per_s(self, role: Role, tp: int, step_tokens: int) -> float:
        """Of prefill in the cheapest steps there are: of one long prompt or of many small ones."""
        totals = [1 << power for power in range(step_tokens.bit_length()) if 1 << power < step_tokens]
        return max(
            total / self._cost(role, tp).step_s([PrefillWork(size, 0)] * (total // size), 0, 0)
            for total in [*totals, step_tokens]
            for size in {min(total, size) for size in (*SMALL_PROMPTS, total)}
            if total % size == 0
        )

    def _decode_tokens_per_s(self, tp: int) -> tuple[Limit, float]:
        """Of one worker with the best batches within the limits, and the limit that binds."""
        cost, tpot_s = self._cost(Role.DECODE, tp), self._slo.tpot_s
        most_s = math.inf if tpot_s is None else tpot_s * self._most_per_step
        pool = int(self._hardware.of(Role.DECODE).kv_tokens(tp) / max(1.0, self._own_context))
        most = max(1, min(self._max_running, pool))
        steps_s = {batch: cost.decode_step_s(batch, round(batch * self._context)) for batch in range(1, most + 1)}
        rate = max((batch / step_s for batch, step_s in steps_s.items() if step_s <= most_s), default=1 / steps_s[1])
        is_memory = pool < self._max_running and steps_s[most] <= most_s
        return Limit.KV_MEMORY if is_memory else Limit.DECODE_LOAD, rate * self._most_per_step

    def _cheapest(self, values: NDArray[np.number]) -> NDArray[np.number]:
        """Without the largest, of requests that may miss."""
        return np.sort(values)[: len(values) - self._most_misses]

    def _at_limit(self, values: NDArray[np.number]) -> float:
        """The largest value among requests that may not miss: at least one has as much."""
        return float(self._cheapest(values)[-1])


def seen_tokens(trace: TrafficTrace, shape: ModelShape) -> NDArray[np.float64]:
    """Tokens that each request's decode steps see on average, over all layers."""
    first, last = trace.prompt_tokens, trace.prompt_tokens + trace.output_tokens
    middle = (first + last) / 2
    if (window := shape.window) is None:
        return shape.layers * middle
    full = np.clip(window.tokens, first, last)
    windowed = ((full**2 - first**2) / 2 + (last - full) * window.tokens) / (last - first)
    seen: NDArray[np.float64] = (shape.layers - window.layers) * middle + window.layers * windowed
    return seen


def allowed_misses(attainment: float, requests: int) -> int:
    """The most requests that may miss their objectives: with one more, the share is below `attainment`."""
    return math.floor((1 - attainment) * requests + 1e-6)


def prompt_s(cost: CostModel, tokens: int, step_tokens: int) -> float:
    """Time to prefill one prompt alone, in chunks of `step_tokens`."""
    return sum(cost.prefill_s(min(step_tokens, tokens - start), start) for start in range(0, tokens, step_tokens))
