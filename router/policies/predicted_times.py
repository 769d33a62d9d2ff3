"""Predicted times of one placement, in seconds from now, which `scores.ExpectedTtft` and `scores.ExpectedTime` add up.
Pure; docs/routing.md has a worked example.

local:    [ queue on D ][ uncached on D ] first token, decoding
handoff:  [ reserve ][ queue on P ][ uncached on P ] first token [ transfer of what D lacks ] decoding
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.types import Candidate, PlacementQuery

MOST_BUSY = 0.9  # the highest busy share that `delay_factor` counts


def prefill_s(query: PlacementQuery, worker: Candidate) -> float:
    """Time until the worker has computed the prompt: the tokens ahead of it and its own uncached ones."""
    return (worker.outstanding_tokens + worker.uncached_tokens(query)) * worker.pace.prefill_s_per_token


def delay_factor(candidates: Sequence[Candidate]) -> float:
    """Seconds of delay to later requests for each second that one of these workers computes a prompt.

    1 / (1 - ρ) if a share ρ of the workers has prompts to compute: the factor by which work extends a queue's busy
    period. One idle worker is added, because the share of few workers says little.
    """
    computing = sum(each.outstanding_tokens > 0 for each in candidates)
    return 1 / (1 - min(MOST_BUSY, computing / (len(candidates) + 1)))


def caused_delay_s(query: PlacementQuery, worker: Candidate, factor: float) -> float:
    """The delay to later requests if this worker computes the prompt. `factor`: of `delay_factor`."""
    return factor * worker.uncached_tokens(query) * worker.pace.prefill_s_per_token


def transfer_s(query: PlacementQuery, decode: Candidate, prefill: Candidate | None = None) -> float:
    """Time from first token to joined. `prefill` None: the decode worker's mean over all prefill workers."""
    per_token_s = decode.pace.transfer_s_per_token
    if prefill is not None:
        per_token_s = prefill.transfer_to.get(decode.worker_epoch, per_token_s)
    return decode.uncached_tokens(query) * per_token_s


def handoff_s(query: PlacementQuery, decode: Candidate, soonest_prefill_s: float) -> float:
    """Time until the request decodes after a handoff. Local prefills on the decode worker delay its batch too."""
    arrived_s = decode.pace.reserve_s + soonest_prefill_s + transfer_s(query, decode)
    return max(arrived_s, decode.outstanding_tokens * decode.pace.prefill_s_per_token)


def decode_s(query: PlacementQuery, decode: Candidate) -> float:
    """Time to decode the expected answer in the worker's batch plus this request."""
    return query.answer_tokens * decode.pace.tpot_at_s(decode.running_requests + 1)
