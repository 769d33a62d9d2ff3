"""The part of a trace to simulate, and its summary for the analytic bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.traces.hits import infinite_cache_hits
from planner.traces.trace import TrafficTrace

_SAMPLES = 48
_ANSWER_WEIGHT = 8  # work of an answer token in prompt tokens, to find the busiest stretch

BUSIEST = "the busiest"  # first words of the note about the part that was simulated


def busiest(trace: TrafficTrace, requests: int) -> TrafficTrace:
    """The stretch of `requests` requests with the most work per second."""
    if requests >= len(trace):
        return trace
    work = np.concatenate([[0.0], np.cumsum(trace.prompt_tokens + _ANSWER_WEIGHT * trace.output_tokens)])
    starts = np.arange(len(trace) - requests)
    seconds = trace.arrival_s[starts + requests] - trace.arrival_s[starts]
    start = int(np.argmax((work[starts + requests] - work[starts]) / np.maximum(seconds, 1e-9)))
    note = f"{BUSIEST} {requests} of {len(trace)} requests"
    return replace(trace.stretch(start, start + requests), notes=(*trace.notes, note))


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """`prompts`: prompt lengths at evenly spaced quantiles. `uncached`: the lowest possible share of prompt tokens to
    compute."""

    requests_per_s: float
    prompts: tuple[int, ...]
    mean_prompt: float
    mean_output: float
    uncached: float

    @classmethod
    def of(cls, trace: TrafficTrace) -> TrafficShape:
        shares = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
        return cls(
            trace.requests_per_s,
            tuple(int(each) for each in np.quantile(trace.prompt_tokens, shares)),
            float(trace.prompt_tokens.mean()),
            float(trace.output_tokens.mean()),
            1.0 - infinite_cache_hits(trace).token_hit_rate,
        )

    def prompt_at(self, share: float) -> int:
        return self.prompts[min(len(self.prompts) - 1, int(share * len(self.prompts)))]
