"""What TTFT and TPOT pools of a given size would have under the present load. Pure.

Prefill is a queue with as many servers as there are prefill workers; its waiting time is Sakasegawa's approximation for
M/M/c ("An approximation formula for Lq = a*rho^b/(1-rho)", 1977). The batch of a decode worker follows from Little's
law: as many requests as tokens come per second, times the time that a token takes in such a batch. Without prefill
workers, decode workers do both, and each has so much less time for the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.policies.pace import START_PACE, Pace

HORIZON_S = 10.0  # in which a backlog grows or shrinks
TAIL = math.log(10)  # nine in ten of exponentially distributed waits are shorter than so many means
MOST_UTILISATION = 0.95  # beyond it, it is the backlog that grows
MOST_FILL = 4.0  # of a decode worker's places: more says no more
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


@dataclass(frozen=True, slots=True)
class Capability:
    """What one worker of each pool can do, measured or by a cost model. `kv_tokens`: what its pool holds."""

    prefill: Pace = field(default=START_PACE)
    decode: Pace = field(default=START_PACE)
    max_running_requests: int = 64
    kv_tokens: int = 1 << 20

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
    prefill_utilisation: float  # beyond 1 a backlog grows


def forecast(layout: Layout, load: Load, can: Capability) -> Forecast:
    """`layout` has at least one decode worker."""
    servers = layout.prefill or layout.decode
    pace = can.prefill if layout.prefill else can.decode
    service_s = load.uncached_tokens * pace.prefill_s_per_token
    utilisation = load.requests_per_s * service_s / servers
    waiting_s = _waiting_s(min(utilisation, MOST_UTILISATION), servers) * service_s
    backlog_s = load.queued_tokens * pace.prefill_s_per_token / servers
    later_s = max(0.0, backlog_s + (utilisation - 1) * HORIZON_S)
    behind_s = (backlog_s + later_s) / 2
    alone_s = service_s + (can.decode.reserve_s if layout.prefill else 0.0)
    tpot_s, fill = _decode(layout, load, can, 0.0 if layout.prefill else utilisation)
    return Forecast(
        ttft_s=alone_s + max(waiting_s, behind_s),
        ttft_tail_s=alone_s + max(TAIL * waiting_s, behind_s),
        tpot_s=tpot_s,
        fill=fill,
        prefill_utilisation=utilisation,
    )


def _waiting_s(utilisation: float, servers: int) -> float:
    """Mean wait in units of the service time."""
    return float(utilisation ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - utilisation)))


def _decode(layout: Layout, load: Load, can: Capability, prefill_share: float) -> tuple[float, float]:
    """TPOT, and the share of places that is needed. `prefill_share`: of its time that a decode worker prefills."""
    places = can.places(load)
    stretch = 1 / (1 - min(prefill_share, MOST_UTILISATION))
    rate = load.answer_tokens_per_s / layout.decode
    batch = running = load.decoding_requests / layout.decode
    for _ in range(_ROUNDS):  # grows to where it stays, or to the bound
        before = batch
        batch = max(running, min(MOST_FILL * places, rate * stretch * can.decode.tpot_at_s(max(1, round(batch)))))
        if batch == before:
            break
    tpot_s = stretch * can.decode.tpot_at_s(max(1, round(min(batch, places))))
    return tpot_s, min(MOST_FILL, batch / places)
