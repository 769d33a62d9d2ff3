"""One model's load, from the routers' counters and the workers' reports. Pure; the caller passes the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.autoscaler import MeasuredRequests
from planner.pool_forecast import Capability, LocalPrompts, ModelLoad
from router.policies.pace import BATCH_SIZES, START_PACE, Pace
from tandem.v1 import trace_pb2, worker_pb2

WINDOW_S = 10.0
MIN_WINDOW_S = 1.0
_COUNTERS = (
    "requests", "prompt_tokens", "first_tokens", "prefilled_tokens", "cached_tokens", "local_tokens", "ttft_s",
    "finished", "answer_tokens", "judged", "missed_ttft", "missed_tpot",
)  # fmt: skip
Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    totals: Counts


class ObservedLoad:
    """One model's load over the last WINDOW_S."""

    def __init__(self, now_s: float) -> None:
        self._seen: dict[tuple[str, int], Counts] = {}  # by router and its epoch
        self._totals: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._samples = deque([_Sample(now_s, dict(self._totals))])
        self._uncached_share = 1.0
        self._local_share = 0.0
        self._answer_tokens = 0.0
        self._prompt_tokens = 0.0
        self._queued_tokens = 0
        self._paces: tuple[Pace, Pace] = (START_PACE, START_PACE)

    def note(self, reports: Mapping[str, tuple[int, trace_pb2.ModelDemand]], now_s: float) -> None:
        """`reports`: by router, the epoch of its counters and their values. Routers that did not answer are missing;
        their next report includes what they counted meanwhile. What a router counted before its first report gives
        means, but no rates: it may be of hours."""
        is_first, known = not self._seen, {router for router, _ in self._seen}
        for router, (epoch, demand) in reports.items():
            counts = {name: float(getattr(demand, name)) for name in _COUNTERS}
            before = self._seen.get((router, epoch), {} if is_first or router in known else counts)
            for name, count in counts.items():
                self._totals[name] += max(0.0, count - before.get(name, 0.0))
            self._seen = {key: each for key, each in self._seen.items() if key[0] != router} | {(router, epoch): counts}
        self._samples.append(_Sample(now_s, dict(self._totals)))
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        demands = [demand for _, demand in reports.values()]
        self._queued_tokens = sum(each.queued_tokens for each in demands)
        prefill = [each.prefill for each in demands if each.HasField("prefill")]
        decode = [each.decode for each in demands if each.HasField("decode")]
        self._paces = _mean(prefill or decode) or self._paces[0], _mean(decode) or self._paces[1]
        self._update_means()
        if is_first and reports:
            self._samples = deque([_Sample(now_s, dict(self._totals))])

    def load(self, prefill: Iterable[worker_pb2.WorkerLoad], decode: Iterable[worker_pb2.WorkerLoad]) -> ModelLoad:
        """`prefill`, `decode`: the reports of the workers of each role."""
        decode = list(decode)
        on_workers = sum(each.waiting_tokens for each in (*prefill, *decode))
        passed_s = self._samples[-1].at_s - self._samples[0].at_s
        requests = self._since(self._samples[0])["requests"]
        return ModelLoad(
            requests_per_s=requests / max(MIN_WINDOW_S, passed_s),
            uncached_tokens=self._uncached_share * self._prompt_tokens,
            context_tokens=self._prompt_tokens + self._answer_tokens,
            answer_tokens=self._answer_tokens,
            queued_tokens=self._uncached_share * self._queued_tokens + on_workers,
            decoding_requests=sum(each.running_requests for each in decode),
            local_share=self._local_share,
        )

    def measured(self, since_s: float) -> MeasuredRequests:
        """Measurements within the window, starting at `since_s` or later."""
        first = next((each for each in self._samples if each.at_s >= since_s), self._samples[-1])
        seen = self._since(first)
        requests = round(seen["first_tokens"])
        return MeasuredRequests(
            requests=requests,
            ttft_s=seen["ttft_s"] / requests if requests else None,
            judged=round(seen["judged"]),
            missed_ttft=round(seen["missed_ttft"]),
            missed_tpot=round(seen["missed_tpot"]),
        )

    def capability(self, max_running_requests: int, kv_tokens: int, local: LocalPrompts) -> Capability:
        return Capability(*self._paces, max_running_requests, kv_tokens, local)

    def _since(self, sample: _Sample) -> dict[str, float]:
        return {name: total - sample.totals[name] for name, total in self._totals.items()}

    def _update_means(self) -> None:
        """Updates the mean lengths. A mean without new requests keeps its value."""
        seen = self._since(self._samples[0])
        if seen["prefilled_tokens"]:
            self._uncached_share = 1 - seen["cached_tokens"] / seen["prefilled_tokens"]
        if computed := seen["prefilled_tokens"] - seen["cached_tokens"]:
            self._local_share = seen["local_tokens"] / computed
        if seen["finished"]:
            self._answer_tokens = seen["answer_tokens"] / seen["finished"]
        if seen["requests"]:
            self._prompt_tokens = seen["prompt_tokens"] / seen["requests"]


def _mean(paces: Sequence[trace_pb2.Pace]) -> Pace | None:
    """None if there is no pace with this version's batch sizes."""
    fitting = [
        Pace(each.prefill_s_per_token, each.reserve_s, each.transfer_s_per_token, tuple(each.tpot_s))
        for each in paces
        if len(each.tpot_s) == len(BATCH_SIZES) and each.prefill_s_per_token > 0
    ]
    return Pace.mean(fitting) if fitting else None
