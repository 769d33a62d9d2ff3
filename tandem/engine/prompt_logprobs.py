"""Logprobs of a prompt's tokens, if a client requests them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tandem.engine.api import ScoredToken
from tandem.request import TokenLogprob

ROWS = 64  # rows of logits in memory at a time, whatever the prompt's length


def score(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Sequence[int], top: int
) -> tuple[ScoredToken, ...]:
    """Logprobs of `tokens`, each from the row of `hidden` [tokens, hidden] before it, at temperature 1, with the `top`
    most likely tokens, best first."""
    edges = [*range(0, len(tokens), ROWS), len(tokens)]
    parts = (_score_rows(logits_of(hidden[a:b]), tokens[a:b], top) for a, b in pairwise(edges))
    return tuple(token for part in parts for token in part)


def _score_rows(logits: Tensor, tokens: Sequence[int], top: int) -> list[ScoredToken]:
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1))
    best = logprobs.topk(min(top, logits.shape[-1]))
    rows = zip(tokens, own.squeeze(1).tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        ScoredToken(token, logprob, tuple(TokenLogprob(*each) for each in zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]
