"""Choosing a token: Gumbel-max over the tokens that truncation leaves.

argmax(logit / temperature + Gumbel noise) draws exactly from the softmax, and noise keyed by (seed, position, token id)
makes the draw independent of batch, worker and tensor-parallel width (docs/architecture.md, Determinism).
Truncation order: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.request import SamplingParams
from tandem.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel

Row = NDArray[np.float32]  # [vocab_size]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """`logprob` and `top` (best first) are of the untempered distribution, and only there when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def choose(logits: Row, params: SamplingParams, position: int) -> Choice:
    """The token at `position` (its place in prompt plus answer, from 0)."""
    token_id = int(np.argmax(logits)) if params.temperature == 0 else _sample(logits, params, position)
    if params.logprobs is None:
        return Choice(token_id)
    return _with_logprobs(logits, token_id, params.logprobs)


def _sample(logits: Row, params: SamplingParams, position: int) -> int:
    scaled = logits.astype(np.float64) / params.temperature
    kept = _candidates(scaled, params)
    values = scaled[kept]
    if params.top_k is not None and params.top_k < len(kept):
        best = np.argpartition(values, -params.top_k)[-params.top_k :]
        kept, values = kept[best], values[best]
    if params.top_p < 1.0:
        kept, values = _top_p(kept, values, params.top_p)
    if params.min_p > 0.0:
        likely = values >= values.max() + np.log(params.min_p)
        kept, values = kept[likely], values[likely]
    noisy = values + gumbel(params.seed, position, kept)
    # Ties fall to the lowest id, whatever order truncation left.
    return int(kept[noisy == noisy.max()].min())


def _candidates(scaled: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """Ids worth looking at. Without truncation by rank, a token further below the best than noise can span can never
    win, so leaving it out changes nothing; a full row then costs little more than its maximum."""
    best = scaled.max()
    if params.top_p < 1.0:
        # Beyond this span even a whole vocabulary holds less than 1e-9 of the mass.
        return np.flatnonzero(scaled >= best - 32.0)
    return np.flatnonzero(scaled >= best - (GUMBEL_MAX - GUMBEL_MIN))


def _top_p(
    kept: NDArray[np.int64], values: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The smallest set of most likely tokens whose probabilities reach `top_p`."""
    order = np.lexsort((kept, -values))
    weights = np.exp(values[order] - values[order[0]])
    reached = np.cumsum(weights) >= top_p * weights.sum()
    count = int(np.argmax(reached)) + 1
    nucleus = order[:count]
    return kept[nucleus], values[nucleus]


def _with_logprobs(logits: Row, token_id: int, count: int) -> Choice:
    row = logits.astype(np.float64)
    best = row.max()
    normaliser = best + np.log(np.exp(row - best).sum())
    top: tuple[TokenLogprob, ...] = ()
    if count:
        ids = np.argpartition(row, -count)[-count:]
        ids = ids[np.lexsort((ids, -row[ids]))]
        top = tuple(TokenLogprob(int(i), float(row[i] - normaliser)) for i in ids)
    return Choice(token_id, float(row[token_id] - normaliser), top)
