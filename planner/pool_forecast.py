"""What TTFT and TPOT pools of a given size would have under the present load. Pure.

Prefill is a queue with as many servers as there are prefill workers; its waiting time is Sakasegawa's approximation for
M/M/c ("An approximation formula for Lq = a*rho^b/(1-rho)", 1977). The batch of a decode worker follows from Little's
law: as many requests as tokens come per second, times the time that a token takes in such a batch. Decode workers
compute some prompts themselves, as far as the router lets them, and all where there is no prefill worker; each has so
much less time for its answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.policies.pace import START_PACE, Pace
from tandem.config.spec import Disaggregation, PolicyName, RouterSpec

HORIZON_S = 10.0  # in which a backlog grows or shrinks
TAIL = math.log(10)  # nine in ten of exponentially distributed waits are shorter than so many means
MOST_UTILISATION = 0.95  # beyond it, it is the backlog that grows
MOST_FILL = 4.0  # of a decode worker's places: more says no more
_SHARES = 5  # of local prompts that are compared
_ROUNDS = 40


class Layout(NamedTuple):
    """So many workers of each role."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P:{self.decode}D"


@dataclass(frozen=True, slots=True)
class Load:
    """Of one model: rates and means of the last seconds, the rest as it is now. Means are of one request."""

    requests_per_s: float = 0.0
    uncached_tokens: float = 0.0  # of its prompt: what is computed
    context_tokens: float = 0.0  # prompt and answer: what it holds in the KV pool in the end
    answer_tokens: float = 0.0
    queued_tokens: float = 0.0  # prompt tokens not computed yet, in routers and on workers
    decoding_requests: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.requests_per_s * self.uncached_tokens

    @property
    def answer_tokens_per_s(self) -> float:
        return self.requests_per_s * self.answer_tokens

    def times(self, factor: float) -> Load:
        """So many times as many requests."""
        return replace(
            self,
            requests_per_s=factor * self.requests_per_s,
            queued_tokens=factor * self.queued_tokens,
            decoding_requests=factor * self.decoding_requests,
        )


class LocalPrompts(NamedTuple):
    """Which prompts a decode worker may compute though there are prefill workers (router/policies/local_prefill.py), by
    their uncached tokens: always, while others decode there, while none do."""

    always: float = 0.0
    while_busy: float = 0.0
    while_idle: float = 0.0

    @classmethod
    def of(cls, spec: RouterSpec) -> LocalPrompts:
        match spec.disaggregation:
            case Disaggregation.ALWAYS:
                return cls()
            case Disaggregation.NEVER:
                return cls(math.inf, math.inf, math.inf)
            case Disaggregation.AUTO:
                always, predicts = spec.local_prefill_max_tokens, spec.policy is PolicyName.EXPECTED_TTFT
                while_busy = spec.local_prefill_busy_max_tokens if predicts else 0
                return cls(always, max(always, while_busy), math.inf if predicts else always)


NO_LOCAL_PROMPTS = LocalPrompts()


@dataclass(frozen=True, slots=True)
class Capability:
    """What one worker of each pool can do, measured or by a cost model. `kv_tokens`: what its pool holds."""

    prefill: Pace = field(default=START_PACE)
    decode: Pace = field(default=START_PACE)
    max_running_requests: int = 64
    kv_tokens: int = 1 << 20
    local: LocalPrompts = NO_LOCAL_PROMPTS

    def places(self, load: Load) -> float:
        """Requests that a decode worker has room for."""
        if load.context_tokens <= 0:
            return float(self.max_running_requests)
        return max(1.0, min(self.max_running_requests, self.kv_tokens / load.context_tokens))


@dataclass(frozen=True, slots=True)
class Forecast:
    """`ttft_s` is a mean; nine requests in ten have at most `ttft_tail_s`."""

    ttft_s: float
    ttft_tail_s: float
    tpot_s: float
    fill: float  # share of the decode workers' places that is needed: beyond 1 requests wait for one
    prefill_utilisation: float  # of the busier pool: beyond 1 a backlog grows


def forecasts(layout: Layout, load: Load, can: Capability) -> list[Forecast]:
    """One for each share of the prompts that decode workers may compute themselves, least first."""
    return [forecast(layout, load, can, share) for share in _local_shares(layout, load, can)]


def _local_shares(layout: Layout, load: Load, can: Capability) -> Sequence[float]:
    tokens, local = load.uncached_tokens, can.local
    if not layout.prefill or tokens <= local.always:
        return (1.0,)
    most = 1.0 if tokens <= local.while_busy else 0.0
    if not most and tokens <= local.while_idle:
        # A batch whose size is Poisson distributed is empty so often; one idle worker is enough.
        idle = math.exp(-_batch(layout, load, can, 0.0))
        most = 1 - (1 - idle) ** layout.decode
    return [most * at / (_SHARES - 1) for at in range(_SHARES)] if most else (0.0,)


def forecast(layout: Layout, load: Load, can: Capability, local: float = 0.0) -> Forecast:
    """`local`: the share of the prompts that decode workers compute. `layout` has at least one decode worker, and a
    prefill worker where `local` is less than 1."""
    pools = []
    if local < 1:
        pools.append((1 - local, _queue(layout.prefill, 1 - local, load, can.prefill, can.decode.reserve_s)))
    if local > 0:
        pools.append((local, _queue(layout.decode, local, load, can.decode, 0.0)))
    tpot_s, fill = _decode(layout, load, can, pools[-1][1].utilisation if local > 0 else 0.0)
    return Forecast(
        ttft_s=sum(share * queue.mean_s for share, queue in pools),
        ttft_tail_s=max(queue.tail_s for _, queue in pools),
        tpot_s=tpot_s,
        fill=fill,
        prefill_utilisation=max(queue.utilisation for _, queue in pools),
    )


class _Queue(NamedTuple):
    mean_s: float
    tail_s: float
    utilisation: float


def _queue(servers: int, share: float, load: Load, pace: Pace, reserve_s: float) -> _Queue:
    """TTFT of the `share` of the prompts that so many workers compute."""
    service_s = load.uncached_tokens * pace.prefill_s_per_token
    utilisation = share * load.requests_per_s * service_s / servers
    waiting_s = _waiting_s(min(utilisation, MOST_UTILISATION), servers) * service_s
    backlog_s = share * load.queued_tokens * pace.prefill_s_per_token / servers
    later_s = max(0.0, backlog_s + (utilisation - 1) * HORIZON_S)
    behind_s, alone_s = (backlog_s + later_s) / 2, service_s + reserve_s
    return _Queue(alone_s + max(waiting_s, behind_s), alone_s + max(TAIL * waiting_s, behind_s), utilisation)


def _waiting_s(utilisation: float, servers: int) -> float:
    """Mean wait in units of the service time."""
    return float(utilisation ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - utilisation)))


def _decode(layout: Layout, load: Load, can: Capability, prefill_share: float) -> tuple[float, float]:
    """TPOT, and the share of places that is needed. `prefill_share`: of its time that a decode worker prefills."""
    places, batch = can.places(load), _batch(layout, load, can, prefill_share)
    tpot_s = _stretch(prefill_share) * can.decode.tpot_at_s(max(1, round(min(batch, places))))
    return tpot_s, min(MOST_FILL, batch / places)


def _batch(layout: Layout, load: Load, can: Capability, prefill_share: float) -> float:
    """Requests of a decode worker."""
    most, stretch = MOST_FILL * can.places(load), _stretch(prefill_share)
    rate = load.answer_tokens_per_s / layout.decode
    batch = running = load.decoding_requests / layout.decode
    for _ in range(_ROUNDS):  # grows to where it stays, or to the bound
        before = batch
        batch = max(running, min(most, rate * stretch * can.decode.tpot_at_s(max(1, round(batch)))))
        if batch == before:
            break
    return batch


def _stretch(prefill_share: float) -> float:
    return 1 / (1 - min(prefill_share, MOST_UTILISATION))
