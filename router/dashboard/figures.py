"""Computes percentiles, rates and shares from the feed's slices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.dashboard import snapshot
from router.dashboard.time_slices import (
    QUANTILES,
    SLICE_S,
    Count,
    Latency,
    Slice,
    TimeSlices,
    longest,
    merged,
    quantile,
    total,
)

WINDOWS_S = (60.0, 300.0)
RATE_WINDOW_S = 30.0
CACHE_WINDOW_S = 300.0
_NOTHING: list[float | None] = [None] * len(QUANTILES)


def summaries(slices: TimeSlices, now_s: float) -> list[snapshot.LatencySummary]:
    return [_summary(slices.recent(window_s, now_s), window_s) for window_s in WINDOWS_S]


def history(slices: TimeSlices, now_s: float, now_unix_s: float) -> snapshot.History:
    known = slices.history(now_s)
    ttft, tpot, itl, e2e = (_series(known, latency) for latency in Latency)
    return snapshot.History(
        slice_s=SLICE_S,
        last_unix_s=now_unix_s - now_s % SLICE_S,
        ttft=ttft,
        tpot=tpot,
        itl=itl,
        e2e=e2e,
        requests=_counts(known, Count.FINISHED),
        not_finished=_counts(known, Count.NOT_FINISHED),
        output_tokens=_counts(known, Count.OUTPUT_TOKENS),
        prompt_tokens=_counts(known, Count.PROMPT_TOKENS),
        handoff_bytes=_counts(known, Count.HANDOFF_BYTES),
    )


def rates(slices: TimeSlices, up_s: float, now_s: float) -> snapshot.Rates:
    recent = slices.recent(RATE_WINDOW_S, now_s)
    # From the start of the oldest slice in the window to now, at most the router's uptime.
    covered_s = max(1.0, min(up_s, RATE_WINDOW_S - SLICE_S + now_s % SLICE_S))

    def rate(count: Count) -> float:
        return total(recent, count) / covered_s

    return snapshot.Rates(
        window_s=covered_s,
        requests_per_s=rate(Count.FINISHED),
        not_finished_per_s=rate(Count.NOT_FINISHED),
        prompt_tokens_per_s=rate(Count.PROMPT_TOKENS),
        output_tokens_per_s=rate(Count.OUTPUT_TOKENS),
        handoffs_per_s=rate(Count.HANDOFFS),
        handoff_bytes_per_s=rate(Count.HANDOFF_BYTES),
    )


def hit_share(slices: TimeSlices, now_s: float) -> float | None:
    recent = slices.recent(CACHE_WINDOW_S, now_s)
    return share(total(recent, Count.CACHED_TOKENS), total(recent, Count.PROMPT_TOKENS))


def wrong_credit_share(slices: TimeSlices, now_s: float) -> float | None:
    recent = slices.recent(CACHE_WINDOW_S, now_s)
    return share(total(recent, Count.WRONG_CREDIT_TOKENS), total(recent, Count.CREDITED_TOKENS))


def hit_share_history(slices: TimeSlices, now_s: float) -> list[float | None]:
    return [
        None if each is None else share(each.counts[Count.CACHED_TOKENS], each.counts[Count.PROMPT_TOKENS])
        for each in slices.history(now_s)
    ]


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _summary(recent: Sequence[Slice], window_s: float) -> snapshot.LatencySummary:
    ttft, tpot, itl, e2e = (_percentiles(merged(recent, each), longest(recent, each)) for each in Latency)
    return snapshot.LatencySummary(window_s, ttft, tpot, itl, e2e)


def _percentiles(buckets: Sequence[int], longest_s: float) -> snapshot.LatencyPercentiles:
    p50, p90, p99 = (quantile(buckets, each, longest_s) for each in QUANTILES)
    return snapshot.LatencyPercentiles(sum(buckets), p50, p90, p99)


def _series(known: Sequence[Slice | None], latency: Latency) -> snapshot.Series:
    last = len(known) - 1
    found = [
        _NOTHING if each is None else each.quantiles(latency, is_closed=slot < last) for slot, each in enumerate(known)
    ]
    p50, p90, p99 = (list(column) for column in zip(*found, strict=True))
    return snapshot.Series(p50, p90, p99)


def _counts(known: Sequence[Slice | None], count: Count) -> list[int]:
    return [0 if each is None else each.counts[count] for each in known]
