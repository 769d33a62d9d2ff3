"""Whether a request met the objectives of its class. Goodput counts the requests that did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.requests.output import Final
from tandem.config.router import ClassSpec
from tandem.errors import ErrorCode
from tandem.request import RequestState


class SloOutcome(StrEnum):
    """A metric label."""

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_BOTH = "missed_both"
    FAILED = "failed"  # an error of ours, or a refusal for lack of capacity


# Refusals that a larger cluster would avoid.
NO_ROOM = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.UNAVAILABLE,
        ErrorCode.NO_WORKER,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.KV_EXHAUSTED,
    }
)


def slo_outcome(
    objectives: ClassSpec, final: Final | None, state: RequestState, code: ErrorCode | None
) -> SloOutcome | None:
    """None for requests that are not counted: bad input, cancelled by the client. An unset objective counts as met."""
    if final is None:
        ours = state is RequestState.FAILED or (state is RequestState.REJECTED and code in NO_ROOM)
        return SloOutcome.FAILED if ours else None
    line, tokens = final.timeline, final.usage.completion_tokens
    late = objectives.ttft_slo_s is not None and line.ttft_s > objectives.ttft_slo_s
    slow = objectives.tpot_slo_s is not None and tokens > 1 and line.decode_s / (tokens - 1) > objectives.tpot_slo_s
    if late and slow:
        return SloOutcome.MISSED_BOTH
    if late or slow:
        return SloOutcome.MISSED_TTFT if late else SloOutcome.MISSED_TPOT
    return SloOutcome.MET


class SloCollector(Collector):
    """The objectives as a metric, for dashboards and alerts."""

    def __init__(self, classes: Sequence[ClassSpec]) -> None:
        self._classes = classes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tandem_class_slo_seconds", "Objectives of each class.", labels=("class", "objective")
        )
        for each in self._classes:
            if each.ttft_slo_s is not None:
                family.add_metric((each.name, "ttft"), each.ttft_slo_s)
            if each.tpot_slo_s is not None:
                family.add_metric((each.name, "tpot"), each.tpot_slo_s)
        yield family
