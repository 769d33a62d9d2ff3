"""Counts and latency histograms of the last minutes, in slices of time. Fixed memory, O(1) per observation. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

SLICE_S = 10.0
SLICES = 60
BUCKETS = 245
LEAST_S = 50e-6
GROWTH = 1.07  # ratio of neighbouring bounds: percentiles are off by at most 7 %
QUANTILES = (0.5, 0.9, 0.99)

_BOUNDS = [LEAST_S * GROWTH**power for power in range(BUCKETS - 1)]
# The bucket of a duration. The first holds all up to LEAST_S, the last all above the highest bound.
bucket_of: Callable[[float], int] = partial(bisect_left, _BOUNDS)


class Latency(IntEnum):
    TTFT = 0
    TPOT = 1
    ITL = 2
    E2E = 3


class Count(IntEnum):
    FINISHED = 0
    NOT_FINISHED = 1  # rejected, cancelled, failed
    PROMPT_TOKENS = 2  # of requests at their first token
    CACHED_TOKENS = 3
    OUTPUT_TOKENS = 4
    CREDITED_TOKENS = 5
    WRONG_CREDIT_TOKENS = 6
    HANDOFFS = 7
    HANDOFF_BYTES = 8


def quantile(buckets: Sequence[int], share: float, longest_s: float) -> float | None:
    """The quantile in seconds; None without observations.

    Interpolates logarithmically between the bounds of a bucket, up to `longest_s`, the largest observation.
    """
    total = sum(buckets)
    if not total:
        return None
    rank, seen = share * total, 0
    for number, count in enumerate(buckets):
        if count and seen + count >= rank:
            low_s = LEAST_S * GROWTH ** (number - 1)
            found_s = low_s * GROWTH ** ((rank - seen) / count) if 0 < number < BUCKETS - 1 else longest_s
            return min(found_s, longest_s)
        seen += count
    return longest_s


@dataclass(slots=True)
class Slice:
    number: int  # start time / SLICE_S
    buckets: list[list[int]] = field(default_factory=lambda: [[0] * BUCKETS for _ in Latency])
    longest_s: list[float] = field(default_factory=lambda: [0.0] * len(Latency))
    counts: list[int] = field(default_factory=lambda: [0] * len(Count))
    _final: list[list[float | None]] | None = None

    def quantiles(self, latency: Latency, *, is_closed: bool) -> list[float | None]:
        """The quantiles at QUANTILES; cached once the slice is closed."""
        if self._final is not None:
            return self._final[latency]
        found = [
            [quantile(row, share, longest_s) for share in QUANTILES]
            for row, longest_s in zip(self.buckets, self.longest_s, strict=True)
        ]
        if is_closed:
            self._final = found
        return found[latency]


class TimeSlices:
    """The slices of the last SLICES * SLICE_S seconds. Times are monotonic seconds and must not decrease."""

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=SLICES)
        self._open = Slice(-1)
        self._open_until_s = -math.inf

    def observe(self, latency: Latency, seconds: float, now_s: float) -> None:
        self.observe_all(latency, (seconds,), now_s)

    def observe_all(self, latency: Latency, durations_s: Sequence[float], now_s: float) -> None:
        """`durations_s`: at least one."""
        now = self._at(now_s)
        buckets = now.buckets[latency]
        for each_s in durations_s:
            buckets[bucket_of(each_s)] += 1
        now.longest_s[latency] = max(now.longest_s[latency], *durations_s)

    def add(self, count: Count, number: int, now_s: float) -> None:
        self._at(now_s).counts[count] += number

    def history(self, now_s: float) -> list[Slice | None]:
        """The last SLICES slices, oldest first; the last is still open. None for a slice without observations."""
        last = int(now_s // SLICE_S)
        known = {each.number: each for each in self._slices}
        return [known.get(number) for number in range(last - SLICES + 1, last + 1)]

    def recent(self, window_s: float, now_s: float) -> list[Slice]:
        """The slices that began within the last `window_s`, the open one included."""
        first = int((now_s - window_s) // SLICE_S) + 1
        return [each for each in self._slices if each.number >= first]

    def _at(self, now_s: float) -> Slice:
        """The open slice."""
        if now_s >= self._open_until_s:
            self._open = Slice(int(now_s // SLICE_S))
            self._open_until_s = (self._open.number + 1) * SLICE_S
            self._slices.append(self._open)
        return self._open


def total(slices: Iterable[Slice], count: Count) -> int:
    return sum(each.counts[count] for each in slices)


def longest(slices: Iterable[Slice], latency: Latency) -> float:
    """The longest duration in seconds; 0 without observations."""
    return max((each.longest_s[latency] for each in slices), default=0.0)


def merged(slices: Iterable[Slice], latency: Latency) -> list[int]:
    """The sum of the slices' histograms."""
    rows = [each.buckets[latency] for each in slices]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else []
