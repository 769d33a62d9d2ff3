"""Samples tokens on the logits' device: the same choice as `tandem/sampling/sampler.py`, from the same noise.

It adds noise to whole rows and sorts rows that are truncated. That is cheap on a GPU, where copying the logits to the
host would take longer than the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from tandem.engine.step import Draw
from tandem.sampling import philox

ROWS: Final = 64  # per batch, which bounds the memory
_MASK: Final = 0xFFFFFFFF


def sample_on_device(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits fp32 [rows, vocab_size] → token ids int64 [rows]. Ties go to the lowest id."""
    edges = range(0, len(draws), ROWS)
    return torch.cat([_draw(logits[at : at + ROWS], draws[at : at + ROWS]) for at in edges])


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    scaled = logits.double() / _column([draw.temperature for draw in draws], logits)
    noisy = scaled + _gumbel(_words(draws, logits.shape[1], logits.device))
    if any(draw.truncates for draw in draws):
        noisy = noisy.masked_fill(~_kept(scaled, draws), -torch.inf)
    return noisy.argmax(dim=1)


def _kept(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens that top-k, then top-p, then min-p keep. bool [rows, vocab_size]"""
    vocab = scaled.shape[1]
    values, ids = scaled.sort(dim=1, descending=True, stable=True)  # stable: ties go to the lowest id
    places = torch.arange(vocab, device=scaled.device)
    kept = places < _column([draw.top_k or vocab for draw in draws], scaled)
    weights = (values - values[:, :1]).exp() * kept
    mass = weights.cumsum(dim=1)
    top_p = _column([draw.top_p for draw in draws], scaled)
    kept &= (mass - weights < top_p * mass[:, -1:]) | (top_p >= 1.0)
    kept &= values >= values[:, :1] + _column([draw.min_p for draw in draws], scaled).log()
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def _words(draws: Sequence[Draw], vocab: int, device: torch.device) -> Tensor:
    """The noise word of each token id, as in `philox.words_of`. int64 [rows, vocab_size]"""

    def of_rows(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device).unsqueeze(1)

    groups = -(-vocab // philox.WORDS)
    x0 = torch.arange(groups, device=device).expand(len(draws), groups)
    x1 = of_rows([draw.position for draw in draws])
    x2, x3 = torch.zeros_like(x1), torch.zeros_like(x1)
    k0, k1 = (of_rows([draw.seed >> shift & _MASK for draw in draws]) for shift in (0, 32))
    for _ in range(philox.ROUNDS):
        product0, product1 = x0 * philox.M0, x2 * philox.M1  # 32 by 32 bits; the sign bit is the highest of 64
        x0, x1, x2, x3 = (
            (product1 >> 32 & _MASK) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = k0 + philox.W0 & _MASK, k1 + philox.W1 & _MASK
    return torch.stack((x0, x1, x2, x3), dim=-1).flatten(1)[:, :vocab]


def _gumbel(words: Tensor) -> Tensor:
    return -(-(-((words.double() + 0.5) * 2.0**-32)).log1p()).log()


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
