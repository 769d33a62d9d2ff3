"""Chooses a token: Gumbel-max over the tokens that truncation keeps.

argmax(logit / temperature + Gumbel noise) draws exactly from the softmax. Noise keyed by (seed, position, token id)
makes the draw independent of batch, worker and tensor-parallel width (docs/architecture.md, Determinism). Penalties and
biases come first (tandem/sampling/penalties.py). The order of truncation is temperature, top-k, top-p, min-p; each
applies to what the previous one kept, renormalised.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.request import SamplingParams, TokenLogprob
from tandem.sampling.penalties import penalised_logits
from tandem.sampling.philox import GUMBEL_MAX, exceedance, gumbel, words_of
from tandem.token_history import TokenHistory

Row = NDArray[np.float32]  # [vocab_size]
Ids = NDArray[np.int64]
Values = NDArray[np.float64]

# Below this, noise could only decide between logits that are equal in fp32, and the division might overflow.
COLDEST = 1e-5
_SAMPLE_OF_BEST = 4096
# Bins of the nucleus search, which cover probabilities down to e^-32 of the best.
_BINS = 2048
_BINS_PER_UNIT = 64.0


class Choice(msgspec.Struct, frozen=True):  # as in engine/api.py: created per token
    """`logprob` and `top` (best first) are of the model's own distribution, and only set if requested."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def needs_only_argmax(params: SamplingParams) -> bool:
    """Whether only the token with the largest logit is needed."""
    is_plain = not params.changes_logits and params.grammar is None
    return params.temperature < COLDEST and is_plain and params.logprobs is None


def choose(
    logits: Row,
    params: SamplingParams,
    position: int,
    history: TokenHistory | None = None,
    best: int | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> Choice:
    """The token at `position`, counted in prompt plus output from 0. Ties go to the lowest id.

    `history` None: no penalties. `best`: index of the largest logit, if known. `allowed` [vocab_size]; None: all.
    """
    row = penalised_logits(logits, params, history or TokenHistory(())) if params.changes_logits else logits
    if allowed is not None:
        row = np.where(allowed, row, -np.inf).astype(np.float32)
    if params.temperature >= COLDEST:
        token_id = _sample(row, params, position)
    elif best is not None and row is logits:
        token_id = best
    else:
        token_id = int(np.argmax(row))
    return scored_choice(logits, token_id, params)


def scored_choice(logits: Row, token_id: int, params: SamplingParams) -> Choice:
    """This token, with the logprobs that `params` ask for."""
    return Choice(token_id) if params.logprobs is None else _with_logprobs(logits, token_id, params.logprobs)


def _sample(logits: Row, params: SamplingParams, position: int) -> int:
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k is None and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _sample_row(scaled, params.seed, position)
    kept, values = np.arange(len(scaled)), scaled
    if params.top_k is not None and params.top_k < len(values):
        best = _largest(values, params.top_k)
        kept, values = kept[best], values[best]
    if params.top_p < 1.0:
        best = _nucleus(values, params.top_p)
        kept, values = kept[best], values[best]
    if params.min_p > 0.0:
        likely = values >= values.max() + np.log(params.min_p)
        kept, values = kept[likely], values[likely]
    return _winner(kept, values + gumbel(words_of(params.seed, position, kept)))


def _winner(ids: Ids, noisy: Values) -> int:
    return int(ids[noisy == noisy.max()].min())


def _sample_row(scaled: Values, seed: int, position: int) -> int:
    """argmax(scaled + noise) over a whole row, computing noise only for the few tokens that could win.

    `reached` is some token's noisy value. A token v below it by d wins only if its noise exceeds d. Its uniform u then
    has 1 - u <= exp(-d), because exp(-exp(-d)) >= 1 - exp(-d). The test is loosened by more than fp32 rounds.
    """
    best = scaled.max()
    ids = np.flatnonzero(scaled >= best - 3.0)[:_SAMPLE_OF_BEST]
    reached = (scaled[ids] + gumbel(words_of(seed, position, ids))).max()
    kept = np.flatnonzero(scaled >= reached - GUMBEL_MAX - 1e-6)
    words = words_of(seed, position, kept)
    below = np.minimum(scaled[kept] - reached, 0.0).astype(np.float32)
    able = exceedance(words).astype(np.float32) <= np.exp(below) * np.float32(1.0 + 1e-4)
    kept, words = kept[able], words[able]
    return _winner(kept, scaled[kept] + gumbel(words))


def _largest(values: Values, count: int) -> Ids:
    """Indices of the `count` largest values. Ties at the edge go to the lowest indices."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    return np.concatenate([above, np.flatnonzero(values == edge)[: count - len(above)]])


def _nucleus(values: Values, top_p: float) -> Ids:
    """Indices of the smallest set of most likely tokens whose probabilities reach `top_p`.

    Ties at the edge go to the lowest indices. Values are binned, so that only the bin at the edge is sorted.
    """
    below = values.max() - values
    weights = np.exp(-below)
    bins = np.minimum(below * _BINS_PER_UNIT, _BINS - 1).astype(np.int64)
    mass = np.cumsum(np.bincount(bins, weights, minlength=_BINS))
    wanted = top_p * mass[-1]
    edge = int(np.searchsorted(mass, wanted))
    within = np.flatnonzero(bins == edge)
    order = within[np.argsort(below[within], kind="stable")]
    before = mass[edge - 1] if edge else 0.0
    count = int(np.searchsorted(before + np.cumsum(weights[order]), wanted)) + 1
    return np.concatenate([np.flatnonzero(bins < edge), order[:count]])


def _with_logprobs(logits: Row, token_id: int, count: int) -> Choice:
    row = logits.astype(np.float64)
    best = row.max()
    normaliser = best + np.log(np.exp(row - best).sum())
    top: tuple[TokenLogprob, ...] = ()
    if count:
        ids = _largest(row, min(count, len(row)))
        ids = ids[np.lexsort((ids, -row[ids]))]
        top = tuple(TokenLogprob(int(i), float(row[i] - normaliser)) for i in ids)
    return Choice(token_id, float(row[token_id] - normaliser), top)
