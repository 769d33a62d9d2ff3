"""Measured speed of workers. Pure apart from the injected clock; nothing survives a restart.

Each figure is a ratio of two sums, seconds and units; the weight of an observation in them halves every HALF_LIFE_S. So
long prompts count for more, and several tokens in one frame do no harm. Some units at the pool's ratio are added to a
worker's sums, and its own count for a limited number of units: a worker without recent observations gets the mean of
its peers, and one slow answer does not exclude a worker for good. A decode worker that has never prefilled gets the
rate of the prefill workers. Without any observation, the start values of router.policies.pace apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from router.policies.pace import (
    BATCH_SIZES,
    START_PACE,
    START_PREFILL_S_PER_TOKEN,
    START_RESERVE_S,
    START_TPOT_S,
    START_TRANSFER_S_PER_TOKEN,
    Pace,
    batch_shape,
)
from tandem.clock import Clock
from tandem.config.model import Role
from tandem.rpc.identity import WorkerEpoch

HALF_LIFE_S = 30.0
STALE_HALF_LIFE_S = 15.0  # of a worker's own observations, from the last one on
REFRESH_S = 0.25  # a worker's figures are recomputed at most this often: each decision reads them for all workers
PEER_PREFILL_TOKENS = 1024
PEER_TRANSFER_TOKENS = 1024
PEER_RESERVATIONS = 4
PEER_DECODE_TOKENS = 64
OWN_WEIGHT = 16.0
OWN_RESERVE_WEIGHT = 1.0  # a busy router's own delay is most of it
START_ANSWER_TOKENS = 128
# With fewer tokens, an observation measures the fixed cost of a step or handoff instead of a rate.
LEAST_PREFILL_TOKENS = 64
LEAST_TRANSFER_TOKENS = 256
MAX_PAIRS = 256
MAX_OBSERVED_S = 300.0  # longer observations are dropped: workers report them
_LEAST_S = 1e-9  # per token; a divisor
_LEAST_WEIGHT = 1e-9  # of an old observation; keeps the ratio of idle sums


@dataclass(slots=True)
class _Ratio:
    """Seconds per unit, weighted by age."""

    seconds: float = 0.0
    units: float = 0.0
    at_s: float = 0.0

    def add(self, seconds: float, units: float, now_s: float) -> None:
        kept = max(_LEAST_WEIGHT, self._kept(now_s))
        self.seconds, self.units, self.at_s = self.seconds * kept + seconds, self.units * kept + units, now_s

    def value(self, start: float) -> float:
        return self.seconds / self.units if self.units else start

    def among_peers(
        self, peers_value: float, peers_units: float, now_s: float, own_weight: float = OWN_WEIGHT
    ) -> float:
        """The ratio with `peers_units` extra units at the peers' ratio, to at most `own_weight` times as many of its
        own: after a busy time, a worker that gets no more requests soon counts as its peers do."""
        if not self.units:
            return peers_value
        own_units = min(self.units, own_weight * peers_units) * self._kept(now_s, STALE_HALF_LIFE_S)
        return (self.seconds / self.units * own_units + peers_value * peers_units) / (own_units + peers_units)

    def _kept(self, now_s: float, half_life_s: float = HALF_LIFE_S) -> float:
        return float(0.5 ** ((now_s - self.at_s) / half_life_s))


class _Sums:
    """The observations of one worker, or of a pool."""

    def __init__(self) -> None:
        self.prefill = _Ratio()
        self.reserve = _Ratio()
        self.transfer = _Ratio()
        self.steps = tuple(_Ratio() for _ in BATCH_SIZES)


class Estimates:
    """The estimates of one router. A pool is all workers of one role and model."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[tuple[str, Role], _Sums] = {}
        self._answers: dict[str, _Ratio] = {}

    def worker(self, model: str, role: Role) -> WorkerEstimates:
        pools = {each: self._pools.setdefault((model, each), _Sums()) for each in Role}
        other = Role.PREFILL if role is Role.DECODE else Role.DECODE
        return WorkerEstimates(self._clock, pools[role], pools[other])

    def answered(self, model: str, tokens: int) -> None:
        """A request finished with `tokens` tokens."""
        self._answers.setdefault(model, _Ratio()).add(tokens, 1, self._clock.now_s())

    def answer_tokens(self, model: str) -> int:
        """The mean length of recent answers."""
        answers = self._answers.get(model)
        return START_ANSWER_TOKENS if answers is None else max(1, round(answers.value(START_ANSWER_TOKENS)))


class WorkerEstimates:
    """The estimates of one epoch of a worker. Drops implausible observations, because workers report some of them."""

    def __init__(self, clock: Clock, pool: _Sums, other_pool: _Sums) -> None:
        self._clock = clock
        self._sums = _Sums()
        self._pool = pool
        self._other_pool = other_pool
        self._pace = START_PACE
        self._fresh_until_s = -math.inf
        self._pairs: dict[WorkerEpoch, _Ratio] = {}
        self._transfer_to: Mapping[WorkerEpoch, float] = {}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Dispatch to first token; `tokens` are the ones ahead of the prompt and its own uncached ones."""
        if tokens >= LEAST_PREFILL_TOKENS:
            self._observe(self._sums.prefill, self._pool.prefill, seconds, tokens)

    def reserved(self, seconds: float) -> None:
        """As a decode worker: Reserve to Reserved."""
        self._observe(self._sums.reserve, self._pool.reserve, seconds, 1)

    def received(self, tokens: int, seconds: float) -> None:
        """As a decode worker: first token to joined, for a handoff of `tokens` tokens."""
        if tokens >= LEAST_TRANSFER_TOKENS:
            self._observe(self._sums.transfer, self._pool.transfer, seconds, tokens)

    def sent(self, to: WorkerEpoch, tokens: int, seconds: float) -> None:
        """As a prefill worker: the same time, for this pair of workers."""
        if tokens >= LEAST_TRANSFER_TOKENS and self._sane(seconds, tokens):
            now_s = self._clock.now_s()
            pair = self._pairs.pop(to, None) or _Ratio()
            pair.add(seconds, tokens, now_s)
            self._pairs[to] = pair
            peers_s = self._other_pool.transfer.value(START_TRANSFER_S_PER_TOKEN)
            known = {**self._transfer_to, to: pair.among_peers(peers_s, PEER_TRANSFER_TOKENS, now_s)}
            if len(self._pairs) > MAX_PAIRS:  # the oldest are likely of epochs that ended
                oldest = next(iter(self._pairs))
                del self._pairs[oldest], known[oldest]
            self._transfer_to = known

    def decoded(self, batch: int, tokens: int, seconds: float) -> None:
        """As a decode worker: tokens of one request in a batch of `batch` requests, itself included.

        They count for the two sizes next to the batch, by their nearness and by the ratios of the present estimates. So
        the estimate at this batch becomes what was measured, whatever the shape between the sizes is.
        """
        pace = self.pace()
        power, above = pace.place(batch)
        expected_s = max(_LEAST_S, pace.tpot_at_s(batch))
        least, most = (
            (0.5, 2.0) if power < len(BATCH_SIZES) - 1 else (0.0, 1.0)
        )  # of steps at sizes within a factor of 2
        for at, share in ((power, 1 - above), (power + 1, above)):
            if share:
                steps = self._sums.steps[at], self._pool.steps[at]
                shape = min(most, max(least, pace.tpot_s[at] / expected_s))
                self._observe(*steps, seconds * shape * share, tokens * share)

    @property
    def transfer_to(self) -> Mapping[WorkerEpoch, float]:
        """Measured seconds per token to each decode worker. The mapping is replaced, never changed."""
        return self._transfer_to

    def pace(self) -> Pace:
        now_s = self._clock.now_s()
        if now_s >= self._fresh_until_s:
            self._pace = self._compute(now_s)
            self._fresh_until_s = now_s + REFRESH_S
        return self._pace

    def _compute(self, now_s: float) -> Pace:
        sums, pool, other = self._sums, self._pool, self._other_pool
        prefill_s = pool.prefill.value(other.prefill.value(START_PREFILL_S_PER_TOKEN))
        transfer_s = pool.transfer.value(START_TRANSFER_S_PER_TOKEN)
        reserve_s = pool.reserve.value(START_RESERVE_S)
        return Pace(
            prefill_s_per_token=max(_LEAST_S, sums.prefill.among_peers(prefill_s, PEER_PREFILL_TOKENS, now_s)),
            reserve_s=sums.reserve.among_peers(reserve_s, PEER_RESERVATIONS, now_s, OWN_RESERVE_WEIGHT),
            transfer_s_per_token=sums.transfer.among_peers(transfer_s, PEER_TRANSFER_TOKENS, now_s),
            tpot_s=self._tpots(now_s),
        )

    def _tpots(self, now_s: float) -> tuple[float, ...]:
        """TPOT at each batch size. Sizes without any measurement extrapolate from the nearest measured one."""
        pool = self._pool.steps
        seen = [power for power, step in enumerate(pool) if step.units]
        found = []
        for power, size in enumerate(BATCH_SIZES):
            peers_s = START_TPOT_S * batch_shape(size)
            if seen:
                near = _nearest(power, seen)
                peers_s = pool[near].value(0.0) * batch_shape(size) / batch_shape(BATCH_SIZES[near])
            found.append(self._sums.steps[power].among_peers(peers_s, PEER_DECODE_TOKENS, now_s))
        return tuple(found)

    def _observe(self, worker: _Ratio, pool: _Ratio, seconds: float, units: float) -> None:
        if self._sane(seconds, units):
            now_s = self._clock.now_s()
            worker.add(seconds, units, now_s)
            pool.add(seconds, units, now_s)

    @staticmethod
    def _sane(seconds: float, units: float) -> bool:
        return units > 0 and 0 <= seconds <= MAX_OBSERVED_S


def _nearest(power: int, seen: list[int]) -> int:
    return min(seen, key=lambda other: abs(other - power))
