"""The step meters that one worker reported, and its recent device utilization. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tandem.v1 import worker_pb2
from worker.meters import STEP_BOUNDS_S, StepKind

WINDOW_S = 15.0
_KINDS = frozenset(kind.value for kind in StepKind)


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    flops: float
    memory_bytes: float
    stepping_s: float


class MeterHistory:
    """`latest`: the last report; None before the first."""

    def __init__(self) -> None:
        self.latest: worker_pb2.WorkerMeters | None = None
        self._moments: deque[_Moment] = deque()

    def take(self, meters: worker_pb2.WorkerMeters, now_s: float) -> None:
        """Records a report, without step histograms of unknown kinds or other buckets."""
        known = [each for each in meters.steps if each.kind in _KINDS and len(each.counts) == len(STEP_BOUNDS_S) + 1]
        if len(known) != len(meters.steps):
            del meters.steps[:]
            meters.steps.extend(known)
        self.latest = meters
        stepping_s = sum(each.total_s for each in meters.steps)
        self._moments.append(_Moment(now_s, meters.flops, meters.memory_bytes, stepping_s))
        self._forget(now_s)

    def mfu(self, now_s: float) -> float | None:
        """Share of peak FLOP/s that the steps of the last WINDOW_S reached; None if there were none."""
        used = self._used(now_s)
        peak = 0.0 if self.latest is None else self.latest.peak_flops_per_s
        return used.flops / (used.stepping_s * peak) if used is not None and peak > 0 else None

    def mbu(self, now_s: float) -> float | None:
        """As `mfu`, for memory bandwidth."""
        used = self._used(now_s)
        peak = 0.0 if self.latest is None else self.latest.peak_memory_bytes_per_s
        return used.memory_bytes / (used.stepping_s * peak) if used is not None and peak > 0 else None

    @property
    def ridge(self) -> float | None:
        """FLOPs per byte of memory traffic at which the device's two peaks meet; None: they are not known."""
        if self.latest is None or not (self.latest.peak_flops_per_s > 0 and self.latest.peak_memory_bytes_per_s > 0):
            return None
        return self.latest.peak_flops_per_s / self.latest.peak_memory_bytes_per_s

    def _used(self, now_s: float) -> _Moment | None:
        self._forget(now_s)
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        stepping_s = last.stepping_s - first.stepping_s
        if stepping_s <= 0:
            return None
        return _Moment(now_s, last.flops - first.flops, last.memory_bytes - first.memory_bytes, stepping_s)

    def _forget(self, now_s: float) -> None:
        """Keeps the last moment before the window as its baseline."""
        moments = self._moments
        while len(moments) > 1 and moments[1].at_s <= now_s - WINDOW_S:
            moments.popleft()
