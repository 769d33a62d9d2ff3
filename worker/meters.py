"""Counters and histograms of the engine's steps, which a worker reports to the routers. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.engine.step_work import StepWork, WorkShape
from tandem.kvcache.host_tier import TierCounts
from tandem.v1 import worker_pb2

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)


class StepKind(StrEnum):
    """The kind of work in a step; a metric label."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # both: a prompt's chunk beside requests that decode


def kind_of(work: StepWork) -> StepKind:
    if work.prefill_tokens and work.decode_tokens:
        return StepKind.MIXED
    return StepKind.PREFILL if work.prefill_tokens else StepKind.DECODE


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    total_s: float = 0.0


class StepMeters:
    """`peak_...`: sums over all ranks. `proposer`: of speculation, if any."""

    def __init__(
        self, shape: WorkShape, *, peak_flops_per_s: float, peak_memory_bytes_per_s: float, proposer: str = ""
    ) -> None:
        self._shape = shape
        self._totals = worker_pb2.WorkerMeters(
            peak_flops_per_s=peak_flops_per_s, peak_memory_bytes_per_s=peak_memory_bytes_per_s, proposer=proposer
        )
        self._steps = {kind: _Histogram() for kind in StepKind}

    def stepped(self, work: StepWork, seconds: float) -> None:
        if not work.prefill_tokens and not work.decode_tokens:
            return  # the step only ended requests
        histogram = self._steps[kind_of(work)]
        histogram.counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        histogram.total_s += seconds
        totals = self._totals
        totals.prefill_tokens += work.prefill_tokens
        totals.decode_tokens += work.decode_tokens
        totals.sampled_tokens += work.sampled_tokens
        totals.proposed_tokens += work.proposed_tokens
        totals.accepted_tokens += work.accepted_tokens
        totals.flops += self._shape.flops(work)
        totals.memory_bytes += self._shape.memory_bytes(work)

    def frame(
        self, preemptions: int, host: TierCounts, links: Iterable[worker_pb2.LinkState]
    ) -> worker_pb2.WorkerMeters:
        """The message to the routers: all totals since the start of this epoch."""
        frame = worker_pb2.WorkerMeters(
            preemptions=preemptions, host_blocks_out=host.blocks_out, host_blocks_in=host.blocks_in, links=links
        )
        frame.MergeFrom(self._totals)
        for kind, histogram in self._steps.items():
            if any(histogram.counts):
                frame.steps.add(kind=kind.value, counts=histogram.counts, total_s=histogram.total_s)
        return frame
