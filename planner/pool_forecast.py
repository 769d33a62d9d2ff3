"""Forecasts TTFT and TPOT of pools of given sizes under the present load. Pure.

Prefill is a queue whose servers are the prefill workers; its waiting time is Sakasegawa's approximation for M/M/c ("An
approximation formula for Lq = a*rho^b/(1-rho)", 1977). The batch of a decode worker follows from Little's law: answer
tokens per second times the time per token in such a batch. Decode workers also compute the prompts that the router
leaves to them, which is every prompt if there is no prefill worker. That time is lost to their answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.policies.pace import START_PACE, Pace
from tandem.config.router import Disaggregation, PolicyName, RouterSpec

HORIZON_S = 10.0  # how far ahead a growing or shrinking backlog is projected
TAIL = math.log(10)  # 90 % of exponentially distributed waits are shorter than this many means
MAX_UTILISATION = 0.95  # above it the backlog term describes the delay
MAX_FILL = 4.0  # upper bound on the share of a decode worker's places
_SHARES = 5  # shares of locally prefilled prompts to compare
_MAX_ITERATIONS = 40


class PoolSizes(NamedTuple):
    """The number of workers of each role."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P:{self.decode}D"


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The load of one model: rates and per-request means over the last seconds; queue and batch as they are now."""

    requests_per_s: float = 0.0
    uncached_tokens: float = 0.0  # mean prompt tokens to compute
    context_tokens: float = 0.0  # mean prompt and answer: what a request holds in the KV pool at its end
    answer_tokens: float = 0.0
    queued_tokens: float = 0.0  # prompt tokens still to compute, in routers and on workers
    decoding_requests: float = 0.0
    local_share: float = 0.0  # of the prompt tokens to compute, that decode workers compute although there are others

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.requests_per_s * self.uncached_tokens

    @property
    def answer_tokens_per_s(self) -> float:
        return self.requests_per_s * self.answer_tokens

    def times(self, factor: float) -> ModelLoad:
        """The same requests at `factor` times the rate."""
        return replace(
            self,
            requests_per_s=factor * self.requests_per_s,
            queued_tokens=factor * self.queued_tokens,
            decoding_requests=factor * self.decoding_requests,
        )


class LocalPrompts(NamedTuple):
    """Upper bounds on the uncached tokens of a prompt that a decode worker may compute although there are prefill
    workers (router/policies/local_prefill.py): always, while other requests decode there, while none do."""

    always: float = 0.0
    while_busy: float = 0.0
    while_idle: float = 0.0

    @classmethod
    def of(cls, spec: RouterSpec, *, bounds_steps: bool = False) -> LocalPrompts:
        """`bounds_steps`: the decode workers have a longest step."""
        match spec.disaggregation:
            case Disaggregation.ALWAYS:
                return cls()
            case Disaggregation.NEVER:
                return cls(math.inf, math.inf, math.inf)
            case Disaggregation.AUTO:
                always, predicts = spec.local_prefill_max_tokens, spec.policy is PolicyName.EXPECTED_TTFT
                while_busy = spec.local_prefill_busy_max_tokens if predicts else 0
                if bounds_steps and while_busy:
                    while_busy = spec.max_prefill_tokens_in_flight
                return cls(always, max(always, while_busy), math.inf if predicts else always)


NO_LOCAL_PROMPTS = LocalPrompts()


@dataclass(frozen=True, slots=True)
class Capability:
    """What one worker of each pool can do, measured or from a cost model. `kv_tokens`: capacity of its KV pool."""

    prefill: Pace = field(default=START_PACE)
    decode: Pace = field(default=START_PACE)
    max_running_requests: int = 64
    kv_tokens: int = 1 << 20
    local: LocalPrompts = NO_LOCAL_PROMPTS

    def places(self, load: ModelLoad) -> float:
        """Requests for which a decode worker has room."""
        if load.context_tokens <= 0:
            return float(self.max_running_requests)
        return max(1.0, min(self.max_running_requests, self.kv_tokens / load.context_tokens))

    def without_prompts(self, sizes: PoolSizes, load: ModelLoad) -> Capability:
        """TPOT was measured while decode workers computed prompts too: without that time."""
        share = load.local_share if sizes.prefill else 1.0
        stretch = _stretch(_queue(sizes.decode, share, load, self.decode, 0.0).utilisation)
        return replace(self, decode=replace(self.decode, tpot_s=tuple(each / stretch for each in self.decode.tpot_s)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """`ttft_s` is a mean; `ttft_tail_s` is the 90th percentile."""

    ttft_s: float
    ttft_tail_s: float
    tpot_s: float
    fill: float  # share of the decode workers' places that is needed; above 1 requests wait for a place


def forecasts(sizes: PoolSizes, load: ModelLoad, capability: Capability) -> list[Forecast]:
    """One forecast for each share of prompts that decode workers may compute, in ascending order."""
    return [forecast(sizes, load, capability, share) for share in _local_shares(sizes, load, capability)]


def _local_shares(sizes: PoolSizes, load: ModelLoad, capability: Capability) -> Sequence[float]:
    tokens, local = load.uncached_tokens, capability.local
    if not sizes.prefill or tokens <= local.always:
        return (1.0,)
    most = 1.0 if tokens <= local.while_busy else 0.0
    if not most and tokens <= local.while_idle:
        # The probability that a Poisson distributed batch is empty; one idle worker is enough.
        idle = math.exp(-_batch(sizes, load, capability, 0.0))
        most = 1 - (1 - idle) ** sizes.decode
    return [most * at / (_SHARES - 1) for at in range(_SHARES)] if most else (0.0,)


def forecast(sizes: PoolSizes, load: ModelLoad, capability: Capability, local: float = 0.0) -> Forecast:
    """`local`: the share of prompts that decode workers compute. `sizes` needs a decode worker, and a prefill worker if
    `local` is less than 1."""
    pools = []
    if local < 1:
        pools.append(
            (1 - local, _queue(sizes.prefill, 1 - local, load, capability.prefill, capability.decode.reserve_s))
        )
    if local > 0:
        pools.append((local, _queue(sizes.decode, local, load, capability.decode, 0.0)))
    tpot_s, fill = _decode(sizes, load, capability, pools[-1][1].utilisation if local > 0 else 0.0)
    return Forecast(
        ttft_s=sum(share * queue.mean_s for share, queue in pools),
        ttft_tail_s=max(queue.tail_s for _, queue in pools),
        tpot_s=tpot_s,
        fill=fill,
    )


class _Queue(NamedTuple):
    mean_s: float
    tail_s: float
    utilisation: float


def _queue(servers: int, share: float, load: ModelLoad, pace: Pace, reserve_s: float) -> _Queue:
    """TTFT of the `share` of prompts that `servers` workers compute."""
    service_s = load.uncached_tokens * pace.prefill_s_per_token
    utilisation = share * load.requests_per_s * service_s / servers
    waiting_s = _waiting_s(min(utilisation, MAX_UTILISATION), servers) * service_s
    backlog_s = share * load.queued_tokens * pace.prefill_s_per_token / servers
    later_s = max(0.0, backlog_s + (utilisation - 1) * HORIZON_S)
    behind_s, alone_s = (backlog_s + later_s) / 2, service_s + reserve_s
    return _Queue(alone_s + max(waiting_s, behind_s), alone_s + max(TAIL * waiting_s, behind_s), utilisation)


def _waiting_s(utilisation: float, servers: int) -> float:
    """Mean wait in units of the service time."""
    return float(utilisation ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - utilisation)))


def _decode(sizes: PoolSizes, load: ModelLoad, capability: Capability, prefill_share: float) -> tuple[float, float]:
    """TPOT, and the share of places that is needed. `prefill_share`: share of a decode worker's time for prefill."""
    places, batch = capability.places(load), _batch(sizes, load, capability, prefill_share)
    tpot_s = _stretch(prefill_share) * capability.decode.tpot_at_s(max(1, round(min(batch, places))))
    return tpot_s, min(MAX_FILL, batch / places)


def _batch(sizes: PoolSizes, load: ModelLoad, capability: Capability, prefill_share: float) -> float:
    """The number of requests in a decode worker's batch."""
    most, stretch = MAX_FILL * capability.places(load), _stretch(prefill_share)
    rate = load.answer_tokens_per_s / sizes.decode
    batch = running = load.decoding_requests / sizes.decode
    for _ in range(_MAX_ITERATIONS):  # iterates to the fixed point, or to the bound
        before = batch
        batch = max(running, min(most, rate * stretch * capability.decode.tpot_at_s(max(1, round(batch)))))
        if batch == before:
            break
    return batch


def _stretch(prefill_share: float) -> float:
    return 1 / (1 - min(prefill_share, MAX_UTILISATION))
