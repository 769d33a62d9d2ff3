"""A simulation's input: pools with their cost models, the router's configuration, faults and objectives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from planner.acceptance import Acceptance
from planner.cost import CostModel
from planner.shared_host import HostCores
from planner.traces.trace import TrafficTrace
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.errors import ConfigError
from tandem.scheduler.batching import BatchRule

MAX_MODEL_TOKENS = 1 << 30
NETWORK_S = 0.0003  # one frame between router and worker


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """All workers of one role. `kv_tokens`: capacity of one worker's KV pool. Limits that are None are the setup's.
    `batches` None: continuous batching. `acceptance` None: no speculation."""

    workers: int
    tp: int
    cost: CostModel
    kv_tokens: int
    max_running_requests: int | None = None
    max_step_tokens: int | None = None
    batches: BatchRule | None = None
    acceptance: Acceptance | None = None
    longest_step_s: float | None = None  # chunks of prompts shrink until a step takes at most this


@dataclass(frozen=True, slots=True)
class Slo:
    """None: no objective. `of_class`: those of classes that have their own."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    of_class: tuple[tuple[str, Slo], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: expected an objective above 0 s, got {value:g}", field=name)

    @property
    def has_ttft(self) -> bool:
        """Whether some class has this objective."""
        return any(each.ttft_s is not None for each in self._each())

    @property
    def has_tpot(self) -> bool:
        return any(each.tpot_s is not None for each in self._each())

    def loosest(self) -> Slo:
        """One that any class's requests meet if they meet their own."""
        return Slo(_largest(each.ttft_s for each in self._each()), _largest(each.tpot_s for each in self._each()))

    def limits(self, trace: TrafficTrace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of each request's class, TTFT and TPOT [n] in seconds; infinite without an objective."""
        own = dict(self.of_class)
        of_label = [own.get(name, self) for name, _ in trace.labels]
        label = np.zeros(len(trace), np.int32) if trace.label is None else trace.label
        ttft, tpot = (
            np.array([math.inf if value is None else value for value in values])[label]
            for values in zip(*((each.ttft_s, each.tpot_s) for each in of_label), strict=True)
        )
        return ttft, tpot

    def check_classes(self, trace: TrafficTrace) -> None:
        """Raises ConfigError for a class that no request has."""
        known = sorted({name for name, _ in trace.labels})
        for name, _ in self.of_class:
            if name not in known:
                there = ", ".join(each or "the default one" for each in known)
                raise ConfigError(
                    f"--class-slo: expected a class of the trace ({there}), got {name}", field="--class-slo"
                )

    def _each(self) -> tuple[Slo, ...]:
        return (self, *(each for _, each in self.of_class))


def _largest(values: Iterable[float | None]) -> float | None:
    """None if one of them is."""
    found = [*values]
    return None if None in found else max(value for value in found if value is not None)


class Paper(StrEnum):
    """A paper whose rule places requests instead of the router's own."""

    DEFLECTION = "deflection"
    PPD = "ppd"
    LAPS = "laps"
    ECOSERVE = "ecoserve"
    TAICHI = "taichi"


class FaultKind(StrEnum):
    WORKER = "worker"  # lost; comes back empty after `for_s`, if given
    REDIS = "redis"  # cache events stop for `for_s`
    LINK = "link"  # the rate of a worker's links is divided by `factor` for `for_s`


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    at_s: float
    worker_id: str = ""
    for_s: float | None = None
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """`worker:decode-0@30`, `worker:decode-0@30+10`, `redis@30+20`, `link:prefill-1@30+20*8`.

        Raises ConfigError with the accepted forms.
        """
        try:
            what, _, when = text.partition("@")
            kind, _, worker_id = what.partition(":")
            when, star, factor = when.partition("*")
            at, _, lasting = when.partition("+")
            for_s, times = float(lasting) if lasting else None, float(factor) if star else 1.0
            fault = cls(FaultKind(kind), float(at), worker_id, for_s, times)
        except ValueError:
            raise _wrong_fault(text) from None
        is_finite = all(map(math.isfinite, (fault.at_s, fault.factor, fault.for_s or 0.0)))
        if (fault.kind is FaultKind.REDIS) == bool(worker_id) or not is_finite or fault.at_s < 0:
            raise _wrong_fault(text)
        is_link = fault.kind is FaultKind.LINK
        if (bool(star), fault.factor > 1) != (is_link, is_link):
            raise _wrong_fault(text)
        if fault.for_s is not None and fault.for_s <= 0:
            raise _wrong_fault(text)
        return fault


def _wrong_fault(text: str) -> ConfigError:
    forms = (
        "worker:decode-0@30, worker:decode-0@30+10 (back after 10 s), redis@30+20, link:prefill-0@30+20*8 "
        "(an eighth of the rate)"
    )
    return ConfigError(f"--fault: expected one of the forms {forms}, got {text[:60]!r}", field="--fault")


@dataclass(frozen=True, slots=True)
class Setup:
    """`block_tokens`: block size of the simulation, which may be larger than the engine's. `layers`, `kv_heads`,
    `kv_token_bytes`: of the model, all ranks together. `prefill` None: an aggregated cluster. `host`: the host that all
    workers share; None: each has its own hardware. `can_change_roles`: workers of both roles are alike."""

    prefill: PoolSetup | None
    decode: PoolSetup
    layers: int
    kv_heads: int
    kv_token_bytes: float
    router: RouterSpec = field(default_factory=RouterSpec)
    max_running_requests: int = 64
    max_step_tokens: int = 512
    max_model_tokens: int = MAX_MODEL_TOKENS
    block_tokens: int = 16
    caches: bool = True  # False: prompts share no prefix, and caches are not tracked
    network_s: float = NETWORK_S
    faults: tuple[Fault, ...] = ()
    paper: Paper | None = None
    autoscaler: AutoscalerSpec = field(default_factory=AutoscalerSpec)
    host: HostCores | None = None
    can_change_roles: bool = True
    device_share: float = 1.0  # of each rank; the pools' costs and sizes contain it
    fixed_s: float = 0.0  # between a request's receipt and its first token, in which no worker computes for it

    def pools(self) -> list[tuple[Role, PoolSetup]]:
        pools = [(Role.DECODE, self.decode)]
        return pools if self.prefill is None else [(Role.PREFILL, self.prefill), *pools]

    @property
    def devices(self) -> int:
        """The fewest that hold all ranks; those of one worker are on different ones."""
        pools = [pool for _, pool in self.pools()]
        ranks_each = int(1 / self.device_share + 1e-9)  # 1 / 0.1 may be a little less than 10
        ranks = sum(pool.workers * pool.tp for pool in pools)
        return max(-(-ranks // ranks_each), *(pool.tp for pool in pools))
