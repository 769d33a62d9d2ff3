"""How fast workers are, as the router measures it. Pure but for the injected clock; nothing is kept over a restart.

Each figure is a ratio of two sums, seconds and units, in which an observation's weight halves with every HALF_LIFE_S:
long prompts count for more, and tokens that come in one frame do no harm. A worker's sums are joined with some units at
the pool's ratio: a worker not seen yet, or not lately, counts as its peers. So one slow answer does not banish a worker
for good. A decode worker that has never prefilled is taken to prefill as the prefill workers do. Before the very first
observation the start values of router.policies.pace hold for all.
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
from router.policies.types import WorkerEpoch
from tandem.clock import Clock
from tandem.config.spec import Role

HALF_LIFE_S = 30.0
REFRESH_S = 0.25  # a worker's figures are worked out anew so often at most: decisions read them for all workers
PEER_PREFILL_TOKENS = 1024
PEER_TRANSFER_TOKENS = 1024
PEER_RESERVATIONS = 4
PEER_DECODE_TOKENS = 64
START_ANSWER_TOKENS = 128
# With fewer tokens an observation shows what a step or a handoff costs in any case, not a rate.
LEAST_PREFILL_TOKENS = 64
LEAST_TRANSFER_TOKENS = 256
MAX_PAIRS = 256
MAX_OBSERVED_S = 300.0  # reports come over the wire; more is no measurement
_LEAST_S = 1e-9  # per token: a rate is divided by
_NOTHING_LEFT = 1e-9  # of an observation's weight; keeps the ratio of sums that nobody adds to


@dataclass(slots=True)
class _Ratio:
    """Seconds per unit, recent ones first."""

    seconds: float = 0.0
    units: float = 0.0
    at_s: float = 0.0

    def add(self, seconds: float, units: float, now_s: float) -> None:
        kept = max(_NOTHING_LEFT, self._kept(now_s))
        self.seconds, self.units, self.at_s = self.seconds * kept + seconds, self.units * kept + units, now_s

    def value(self, start: float) -> float:
        return self.seconds / self.units if self.units else start

    def among_peers(self, peers_value: float, peers_units: float, now_s: float) -> float:
        """The ratio, as if `peers_units` units more had been seen at the peers' ratio."""
        if not self.units:
            return peers_value
        kept = self._kept(now_s)
        return (self.seconds * kept + peers_value * peers_units) / (self.units * kept + peers_units)

    def _kept(self, now_s: float) -> float:
        return float(0.5 ** ((now_s - self.at_s) / HALF_LIFE_S))


class _Sums:
    """What one worker, or a pool, was seen to do."""

    def __init__(self) -> None:
        self.prefill = _Ratio()
        self.reserve = _Ratio()
        self.transfer = _Ratio()
        self.steps = tuple(_Ratio() for _ in BATCH_SIZES)


class Estimates:
    """One for a router. `worker` gives each worker its own; a pool is the workers of a role for one model."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[tuple[str, Role], _Sums] = {}
        self._answers: dict[str, _Ratio] = {}

    def worker(self, model: str, role: Role) -> WorkerEstimates:
        pools = {each: self._pools.setdefault((model, each), _Sums()) for each in Role}
        other = Role.PREFILL if role is Role.DECODE else Role.DECODE
        return WorkerEstimates(self._clock, pools[role], pools[other])

    def answered(self, model: str, tokens: int) -> None:
        """A request finished with so many tokens."""
        self._answers.setdefault(model, _Ratio()).add(tokens, 1, self._clock.now_s())

    def answer_tokens(self, model: str) -> int:
        """The mean length of late answers."""
        answers = self._answers.get(model)
        return START_ANSWER_TOKENS if answers is None else max(1, round(answers.value(START_ANSWER_TOKENS)))


class WorkerEstimates:
    """Of one life of a worker. Observations that make no sense are dropped: some come over the wire."""

    def __init__(self, clock: Clock, pool: _Sums, other_pool: _Sums) -> None:
        self._clock = clock
        self._own = _Sums()
        self._pool = pool
        self._other_pool = other_pool
        self._pace = START_PACE
        self._fresh_until_s = -math.inf
        self._pairs: dict[WorkerEpoch, _Ratio] = {}
        self._transfer_to: Mapping[WorkerEpoch, float] = {}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Dispatch to first token; `tokens` are those ahead of it and its own uncached ones."""
        if tokens >= LEAST_PREFILL_TOKENS:
            self._observe(self._own.prefill, self._pool.prefill, seconds, tokens)

    def reserved(self, seconds: float) -> None:
        """As a decode worker: Reserve to Reserved."""
        self._observe(self._own.reserve, self._pool.reserve, seconds, 1)

    def received(self, tokens: int, seconds: float) -> None:
        """As a decode worker: first token to joined, of a handoff that moved so many tokens."""
        if tokens >= LEAST_TRANSFER_TOKENS:
            self._observe(self._own.transfer, self._pool.transfer, seconds, tokens)

    def sent(self, to: WorkerEpoch, tokens: int, seconds: float) -> None:
        """As a prefill worker: the same handoff, of this pair of workers."""
        if tokens >= LEAST_TRANSFER_TOKENS and self._sane(seconds, tokens):
            now_s = self._clock.now_s()
            pair = self._pairs.pop(to, None) or _Ratio()
            pair.add(seconds, tokens, now_s)
            self._pairs[to] = pair
            peers_s = self._other_pool.transfer.value(START_TRANSFER_S_PER_TOKEN)
            known = {**self._transfer_to, to: pair.among_peers(peers_s, PEER_TRANSFER_TOKENS, now_s)}
            if len(self._pairs) > MAX_PAIRS:  # lives that ended long ago
                oldest = next(iter(self._pairs))
                del self._pairs[oldest], known[oldest]
            self._transfer_to = known

    def decoded(self, batch: int, tokens: int, seconds: float) -> None:
        """As a decode worker: one request's tokens in a batch of `batch`, of which it was one."""
        power = min(max(1, batch).bit_length(), len(BATCH_SIZES)) - 1
        at_size_s = seconds * batch_shape(BATCH_SIZES[power]) / batch_shape(max(1, batch))
        self._observe(self._own.steps[power], self._pool.steps[power], at_size_s, tokens)

    @property
    def transfer_to(self) -> Mapping[WorkerEpoch, float]:
        """Seconds per token to decode workers it has sent to. Never changed in place."""
        return self._transfer_to

    def pace(self) -> Pace:
        now_s = self._clock.now_s()
        if now_s >= self._fresh_until_s:
            self._pace = self._compute(now_s)
            self._fresh_until_s = now_s + REFRESH_S
        return self._pace

    def _compute(self, now_s: float) -> Pace:
        own, pool, other = self._own, self._pool, self._other_pool
        prefill_s = pool.prefill.value(other.prefill.value(START_PREFILL_S_PER_TOKEN))
        transfer_s = pool.transfer.value(START_TRANSFER_S_PER_TOKEN)
        reserve_s = pool.reserve.value(START_RESERVE_S)
        return Pace(
            prefill_s_per_token=max(_LEAST_S, own.prefill.among_peers(prefill_s, PEER_PREFILL_TOKENS, now_s)),
            reserve_s=own.reserve.among_peers(reserve_s, PEER_RESERVATIONS, now_s),
            transfer_s_per_token=own.transfer.among_peers(transfer_s, PEER_TRANSFER_TOKENS, now_s),
            tpot_s=self._tpots(now_s),
        )

    def _tpots(self, now_s: float) -> tuple[float, ...]:
        """At batch sizes that no peer had yet: from the nearest size that one had."""
        pool = self._pool.steps
        seen = [power for power, step in enumerate(pool) if step.units]
        found = []
        for power, size in enumerate(BATCH_SIZES):
            peers_s = START_TPOT_S * batch_shape(size)
            if seen:
                near = _nearest(power, seen)
                peers_s = pool[near].value(0.0) * batch_shape(size) / batch_shape(BATCH_SIZES[near])
            found.append(self._own.steps[power].among_peers(peers_s, PEER_DECODE_TOKENS, now_s))
        return tuple(found)

    def _observe(self, own: _Ratio, pool: _Ratio, seconds: float, units: int) -> None:
        if self._sane(seconds, units):
            now_s = self._clock.now_s()
            own.add(seconds, units, now_s)
            pool.add(seconds, units, now_s)

    @staticmethod
    def _sane(seconds: float, units: int) -> bool:
        return units > 0 and 0 <= seconds <= MAX_OBSERVED_S


def _nearest(power: int, seen: list[int]) -> int:
    return min(seen, key=lambda other: abs(other - power))
