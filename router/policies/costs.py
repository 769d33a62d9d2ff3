"""Predictions of one placement, in seconds from now. Pure; the worked example is in docs/routing.md.

local:    [ queue on D ][ uncached on D ] first token, decoding
handoff:  [ reserve ][ queue on P ][ uncached on P ] first token [ transfer of what D lacks ] decoding
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.types import Candidate, PlacementQuery

MOST_BUSY = 0.9  # of a pool, as far as `later_price` goes


def prefill_s(query: PlacementQuery, worker: Candidate) -> float:
    """Until the worker has computed the prompt: the tokens ahead of it and its own uncached ones."""
    return (worker.outstanding_tokens + worker.uncached_tokens(query)) * worker.pace.prefill_s_per_token


def later_price(candidates: Sequence[Candidate]) -> float:
    """Seconds that those who come later wait for each second that one of these workers computes a prompt. Where a share
    ρ has prompts to compute that is 1 / (1 - ρ): by so much a second of work makes a queue's busy period longer. Of few
    workers the share says less, so an idle one is added."""
    computing = sum(each.outstanding_tokens > 0 for each in candidates)
    return 1 / (1 - min(MOST_BUSY, computing / (len(candidates) + 1)))


def later_s(query: PlacementQuery, worker: Candidate, price: float) -> float:
    """What it costs the requests that come later that this worker computes the prompt. `price`: `later_price`."""
    return price * worker.uncached_tokens(query) * worker.pace.prefill_s_per_token


def transfer_s(query: PlacementQuery, decode: Candidate, prefill: Candidate | None = None) -> float:
    """First token to joined. `prefill` None: from any worker."""
    per_token_s = decode.pace.transfer_s_per_token
    if prefill is not None:
        per_token_s = prefill.transfer_to.get(decode.worker_epoch, per_token_s)
    return decode.uncached_tokens(query) * per_token_s


def ttft_s(query: PlacementQuery, decode: Candidate, prefill: Candidate | None) -> float:
    """Predicted TTFT of a placement now. The first token does not wait for the transfer. `prefill` None: local."""
    if prefill is None:
        return prefill_s(query, decode)
    return decode.pace.reserve_s + prefill_s(query, prefill)


def handoff_s(query: PlacementQuery, decode: Candidate, soonest_prefill_s: float) -> float:
    """Until the request decodes after a handoff. Local prefills on the decode worker hold up its batch as well."""
    arrived_s = decode.pace.reserve_s + soonest_prefill_s + transfer_s(query, decode)
    return max(arrived_s, decode.outstanding_tokens * decode.pace.prefill_s_per_token)


def decode_s(query: PlacementQuery, decode: Candidate) -> float:
    """The expected answer at the pace of a batch with one request more."""
    return query.answer_tokens * decode.pace.tpot_at_s(decode.running_requests + 1)
