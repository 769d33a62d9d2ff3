"""Scores: each rates the candidates for a request in one respect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.policies.local_prefill import LocalPrefill
from router.policies.predicted_times import caused_delay_s, decode_s, delay_factor, handoff_s, prefill_s, transfer_s
from router.policies.types import Candidate, PlacementQuery

FEW_REQUESTS = 8  # among so few, one more or less is no reason to leave a worker that has the prompt's prefix


@dataclass(frozen=True, slots=True)
class ExpectedTtft:
    """For prefill workers: (shortest time) / (its time) until the prompt is computed and moved.

    The time includes the delay to later requests.
    """

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        factor = delay_factor(candidates)
        times_s = [prefill_s(query, each) + caused_delay_s(query, each, factor) for each in candidates]
        if query.decode is not None:
            times_s = [s + transfer_s(query, query.decode, each) for s, each in zip(times_s, candidates, strict=True)]
        return _shortest_first(times_s)


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """For decode workers: (shortest time) / (its time) until the answer is complete.

    The time is that until the request decodes plus that of decoding. So a popular prefix attracts requests only until
    the batch of its worker costs them more time than a transfer of the prefix.
    """

    local: LocalPrefill | None  # None: always hand off if there is a prefill worker

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        factor = delay_factor(candidates)
        return _shortest_first([self._time_s(query, each, factor) for each in candidates])

    def _time_s(self, query: PlacementQuery, worker: Candidate, factor: float) -> float:
        if query.prefill_s is None or (self.local is not None and self.local.takes(query, worker)):
            return prefill_s(query, worker) + decode_s(query, worker) + caused_delay_s(query, worker, factor)
        return handoff_s(query, worker, query.prefill_s) + decode_s(query, worker)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Share of the prompt that is cached."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [min(1.0, candidate.cached_tokens / max(1, query.prompt_tokens)) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Share of the KV pool that is free or evictable."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [candidate.free_blocks / max(1, candidate.total_blocks) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class FewestRunning:
    """1 / (1 + running requests)."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [1.0 / (1 + candidate.running_requests) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """1 - running requests / (those of the largest batch + FEW_REQUESTS)."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        most = max(candidate.running_requests for candidate in candidates) + FEW_REQUESTS
        return [1 - candidate.running_requests / most for candidate in candidates]


@dataclass(frozen=True, slots=True)
class FewestTokens:
    """1 / (1 + prompt tokens to compute); ignores what is cached."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [1.0 / (1 + candidate.outstanding_tokens) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """1 for the session's worker, which has the highest hash of session and worker id (rendezvous hashing).

    All routers agree on it without communication. When workers join or leave, only their own sessions move.
    """

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        if query.session is None:
            return [0.0] * len(candidates)
        home = max(candidates, key=lambda each: _hash(query.session, each.worker_id)).worker_id
        return [float(candidate.worker_id == home) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Random points, equal for the same request number and seed."""

    seed: int

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        key = b"%d.%d" % (self.seed, query.number)
        return [_hash(key, candidate.worker_id) / 2**64 for candidate in candidates]


@dataclass(frozen=True, slots=True)
class InTurn:
    """1 for the worker whose turn it is, ordered by id."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        names = sorted(candidate.worker_id for candidate in candidates)
        turn = names[query.number % len(names)]
        return [float(candidate.worker_id == turn) for candidate in candidates]


def _shortest_first(times_s: list[float]) -> list[float]:
    shortest_s = min(times_s, default=0.0)
    return [shortest_s / time_s if time_s else 1.0 for time_s in times_s]


def _hash(key: bytes | None, worker_id: str) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), key=key or b"", digest_size=8).digest())
