"""Cost of the cluster's ranks and of its tokens. Every router counts the whole cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observe.metrics.workers import SpecWorker
from router.workers.fleet import Fleet
from tandem.clock import Clock

WINDOW_S = 300.0
BETWEEN_S = 5.0  # least distance between two moments of the window

PoolKey = tuple[str, str]  # model, role


class CostMeter:
    """Accrues cost for all known ranks, busy or idle. Pure apart from the clock."""

    def __init__(self, per_rank_hour: float, clock: Clock) -> None:
        self.total: dict[PoolKey, float] = {}  # accrued so far
        self._per_rank_s = per_rank_hour / 3600
        self._clock = clock
        self._ranks: Mapping[PoolKey, int] = {}
        self._since_s = clock.now_s()
        self._moments: deque[tuple[float, dict[str, float], dict[str, int]]] = deque()  # time, cost, tokens by model

    def per_hour(self) -> dict[PoolKey, float]:
        return {pool: ranks * self._per_rank_s * 3600 for pool, ranks in self._ranks.items()}

    def set_ranks(self, ranks: Mapping[PoolKey, int]) -> None:
        self.accrue()
        self._ranks = ranks

    def accrue(self) -> None:
        now_s = self._clock.now_s()
        for pool, ranks in self._ranks.items():
            self.total[pool] = self.total.get(pool, 0.0) + ranks * self._per_rank_s * (now_s - self._since_s)
        self._since_s = now_s

    def per_million_tokens(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Cost per million generated tokens over the last WINDOW_S, by model.

        `tokens`: totals of the present workers, by model. If one decreased, a worker was replaced: the window restarts.
        """
        self.accrue()
        now_s, cost = self._clock.now_s(), self._by_model()
        moments = self._moments
        if moments and any(tokens.get(model, 0) < count for model, count in moments[-1][2].items()):
            moments.clear()
        if not moments or now_s - moments[-1][0] >= BETWEEN_S:
            moments.append((now_s, cost, dict(tokens)))
        while len(moments) > 1 and moments[1][0] <= now_s - WINDOW_S:
            moments.popleft()
        _, cost_then, tokens_then = moments[0]
        found = {}
        for model, count in tokens.items():
            made = count - tokens_then.get(model, 0)
            if made > 0:
                found[model] = 1e6 * (cost.get(model, 0.0) - cost_then.get(model, 0.0)) / made
        return found

    def _by_model(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (model, _), cost in self.total.items():
            found[model] = found.get(model, 0.0) + cost
        return found


def ranks_of(workers: Iterable[SpecWorker]) -> Counter[PoolKey]:
    ranks: Counter[PoolKey] = Counter()
    for worker in workers:
        ranks[worker.model, worker.role.value] += worker.ranks
    return ranks


class CostCollector(Collector):
    def __init__(self, meter: CostMeter, fleet: Fleet) -> None:
        self._meter = meter
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        self._meter.accrue()
        hourly = GaugeMetricFamily("tandem_cost_per_hour", "Price of the pools per hour.", labels=("model", "role"))
        for pool, price in self._meter.per_hour().items():
            hourly.add_metric(pool, price)
        yield hourly
        total = CounterMetricFamily(
            "tandem_cost", "Cost of the pools since the router started.", labels=("model", "role")
        )
        for pool, cost in self._meter.total.items():
            total.add_metric(pool, cost)
        yield total
        each = GaugeMetricFamily(
            "tandem_cost_per_million_tokens",
            "Cost per million generated tokens over the last five minutes.",
            labels=("model",),
        )
        for model, price in self._meter.per_million_tokens(self._tokens()).items():
            each.add_metric((model,), price)
        yield each

    def _tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for worker in self._fleet.workers():
            if (meters := worker.link.meters.latest) is not None:
                tokens[worker.link.info.model] += (
                    meters.sampled_tokens - meters.proposed_tokens + meters.accepted_tokens
                )
        return tokens
