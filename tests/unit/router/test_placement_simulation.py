"""Placement under load, in virtual time: policies as they are, workers as queues with a known pace.

A prefill worker computes one prompt after the other and then has it cached. A decode worker takes a request in when it
has come, and gives all that it runs a token each step, which lasts longer the more it runs.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import pytest

from router.policies.pace import START_PACE
from router.policies.placement import named_policy
from router.policies.types import Candidate, Placement, PlacementQuery, PlacementReason
from tandem.config.router import Disaggregation, PolicyName, RouterSpec

PACE = START_PACE  # 4,000 tokens/s, 20 µs a token moved, 31 ms a step
ANSWER_TOKENS = 100


@dataclass
class SimWorker:
    name: str
    cached: dict[str, int] = field(default_factory=dict)  # tokens of each prefix
    outstanding: int = 0
    busy_until_s: float = 0.0
    running: int = 0
    most_running: int = 0

    def candidate(self, prefix: str) -> Candidate:
        cached, waiting = self.cached.get(prefix, 0), self.outstanding
        return Candidate(self.name, 1, cached, waiting, waiting, self.running, 10_000, 10_000, pace=PACE)


@dataclass
class Result:
    ttft_s: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    prefill_requests: Counter[str] = field(default_factory=Counter)
    decode_requests: Counter[str] = field(default_factory=Counter)
    most_running: int = 0
    most_local_tokens: int = 0  # on a decode worker beside running requests
    reasons: Counter[PlacementReason] = field(default_factory=Counter)

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)


class Simulation:
    """Never a full worker: what waits, waits at a worker."""

    def __init__(
        self, name: PolicyName, mode: Disaggregation = Disaggregation.AUTO, *, prefill: int = 4, decode: int = 4
    ) -> None:
        spec = RouterSpec(policy=name, disaggregation=mode, max_prefill_tokens_in_flight=1 << 20)
        self.policy = named_policy(spec)
        self.prefill = {f"p{number}": SimWorker(f"p{number}") for number in range(prefill)}
        self.decode = {f"d{number}": SimWorker(f"d{number}") for number in range(decode)}
        self.result = Result()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def run(self, arrivals: Sequence[tuple[float, str, int, int]]) -> Result:
        """`arrivals`: when, which prefix, its tokens, own tokens."""
        for number, (at_s, prefix, shared, own) in enumerate(arrivals):
            self._at(at_s, lambda now_s, p=prefix, s=shared, o=own, n=number: self._arrive(now_s, p, s, o, n))  # type: ignore[misc]
        while self._events:
            at_s, _, happen = heapq.heappop(self._events)
            happen(at_s)
        workers = self.decode.values()
        self.result.most_running = max(each.most_running for each in workers)
        assert all(each.running == each.outstanding == 0 for each in workers)
        return self.result

    def _at(self, at_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _arrive(self, now_s: float, prefix: str, shared: int, own: int, number: int) -> None:
        query = PlacementQuery(shared + own, answer_tokens=ANSWER_TOKENS, number=number)
        placed = self.policy.place(
            query,
            [each.candidate(prefix) for each in self.decode.values()],
            [each.candidate(prefix) for each in self.prefill.values()],
        )
        assert isinstance(placed, Placement)
        decode = self.decode[placed.decode.worker_id]
        prefiller = decode if placed.prefill is None else self.prefill[placed.prefill.worker_id]
        tokens = query.prompt_tokens - prefiller.cached.get(prefix, 0)
        prefiller.busy_until_s = max(now_s, prefiller.busy_until_s) + tokens * PACE.prefill_s_per_token
        prefiller.outstanding += tokens
        if placed.prefill is None and decode.running:
            self.result.most_local_tokens = max(self.result.most_local_tokens, decode.outstanding)
        decode.running += 1
        decode.most_running = max(decode.most_running, decode.running)
        self.result.computed_tokens += tokens
        self.result.reasons[placed.reason] += 1
        self.result.decode_requests[decode.name] += 1
        if placed.prefill is not None:
            self.result.prefill_requests[prefiller.name] += 1

        def prefilled(at_s: float) -> None:
            prefiller.outstanding -= tokens
            prefiller.cached[prefix] = shared
            self.result.ttft_s.append(at_s - now_s)
            moved = 0 if placed.prefill is None else query.prompt_tokens - decode.cached.get(prefix, 0)
            decode.cached[prefix] = shared
            self._step(at_s + moved * PACE.transfer_s_per_token, decode, ANSWER_TOKENS)

        self._at(prefiller.busy_until_s, prefilled)

    def _step(self, now_s: float, decode: SimWorker, left: int) -> None:
        """Ten tokens at a time."""
        if left == 0:
            decode.running -= 1
        else:
            self._at(now_s + 10 * PACE.tpot_at_s(decode.running), lambda at_s: self._step(at_s, decode, left - 10))


Draw = Callable[[random.Random], tuple[str, int, int]]


def poisson(requests_per_s: float, number: int, draw: Draw) -> list[tuple[float, str, int, int]]:
    chance, at_s, arrivals = random.Random(1), 0.0, []
    for _ in range(number):
        at_s += chance.expovariate(requests_per_s)
        arrivals.append((at_s, *draw(chance)))
    return arrivals


def popular(chance: random.Random) -> tuple[str, int, int]:
    """Nine in ten begin with the same 4,000 tokens, which fill a prefill worker for a second."""
    return ("hot" if chance.random() < 0.9 else f"own-{chance.random()}"), 4000, 100


def several(chance: random.Random) -> tuple[str, int, int]:
    """One of sixty prefixes, some more popular than others."""
    return f"prefix-{int(60 * chance.random() ** 2)}", 4000, 200


def long_prompts(chance: random.Random) -> tuple[str, int, int]:
    """Half of them long, nothing shared."""
    return f"own-{chance.random()}", 0, 1500 if chance.random() < 0.5 else 150


@cache
def simulated(name: PolicyName, draw: Draw, requests_per_s: float, number: int) -> Result:
    return Simulation(name).run(poisson(requests_per_s, number, draw))


class TestPopularPrefix:
    """Fifteen requests a second: two thirds of what four prefill workers can do."""

    def result(self, name: PolicyName = PolicyName.EXPECTED_TTFT) -> Result:
        return simulated(name, popular, 15, 2000)

    @pytest.mark.acceptance(25, here="simulated: 2,000 requests, four workers of each role")
    def test_does_not_sink_one_worker(self) -> None:
        result = self.result()
        assert max(result.prefill_requests.values()) < 1.5 / 4 * len(result.ttft_s)
        assert max(result.decode_requests.values()) < 0.3 * len(result.ttft_s)
        assert result.most_running < 2 * 15 * ANSWER_TOKENS * PACE.tpot_at_s(16) / 4

    def test_sinks_one_worker_where_only_the_cache_counts(self) -> None:
        assert self.result(PolicyName.CACHE_ONLY).mean_ttft_s > 100 * self.result().mean_ttft_s

    @pytest.mark.parametrize("name", [PolicyName.RANDOM, PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOADED])
    def test_is_answered_sooner_than_by_a_policy_blind_to_the_cache(self, name: PolicyName) -> None:
        assert self.result().mean_ttft_s < 0.75 * self.result(name).mean_ttft_s


class TestSeveralPrefixes:
    """More than one worker's time allows to compute everywhere."""

    @pytest.mark.parametrize(
        "name", [PolicyName.RANDOM, PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOADED, PolicyName.CACHE_ONLY]
    )
    def test_each_is_kept_on_few_workers_and_all_are_answered_sooner(self, name: PolicyName) -> None:
        ours, other = (simulated(each, several, 12, 1000) for each in (PolicyName.EXPECTED_TTFT, name))
        assert ours.mean_ttft_s < 0.75 * other.mean_ttft_s
        if name is not PolicyName.CACHE_ONLY:
            assert ours.computed_tokens < 0.75 * other.computed_tokens


class TestLatePrefillPool:
    """One prefill worker with more than it can do, four decode workers."""

    def result(self, mode: Disaggregation) -> Result:
        return Simulation(PolicyName.EXPECTED_TTFT, mode, prefill=1).run(poisson(5, 500, long_prompts))

    def test_decode_workers_help_out_and_their_running_requests_are_spared(self) -> None:
        auto, always = self.result(Disaggregation.AUTO), self.result(Disaggregation.ALWAYS)
        assert auto.mean_ttft_s < 0.4 * always.mean_ttft_s
        assert auto.reasons[PlacementReason.LOCAL_SOONER] > 100
        assert auto.reasons[PlacementReason.HANDOFF_SPARES_DECODES] > 0
        assert 150 <= auto.most_local_tokens <= RouterSpec().local_prefill_busy_max_tokens
        assert set(always.reasons) == {PlacementReason.HANDOFF_CONFIGURED}

    def test_a_prefill_pool_with_time_to_spare_does_nearly_all(self) -> None:
        result = Simulation(PolicyName.EXPECTED_TTFT, Disaggregation.AUTO).run(poisson(5, 500, long_prompts))
        assert result.reasons[PlacementReason.HANDOFF_AS_SOON] > 450
