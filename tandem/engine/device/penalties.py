"""Applies penalties and biases to logits on their device: the same changes as `tandem/sampling/penalties.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.step import Penalties

Numbers = NDArray[np.int64] | NDArray[np.float64]


def penalty_arrays(changed: Iterable[Penalties]) -> list[Numbers]:
    """What `penalised` needs, for one copy to the device.

    fp64 [4, rows]: repetition, frequency and presence penalty, and whether to add the last token. Then int64 [2, n]:
    row and id of each prompt token; int64 [3, n]: row, id and count of each output token; int64 [2, n]: row and id of
    each bias, and fp64 [n]: its value. Empty without rows.
    """
    penalties = list(changed)
    if not penalties:
        return []
    params = [[each.repetition, each.frequency, each.presence, each.adds_last] for each in penalties]
    prompts, answers, counts, biased = (
        [np.frombuffer(getattr(each, name), dtype=np.int32) for each in penalties]
        for name in ("prompt", "answer", "counts", "biased")
    )
    biases = np.concatenate([np.frombuffer(each.biases, dtype=np.float32) for each in penalties])
    return [
        np.array(params, dtype=np.float64).T.copy(),
        np.stack([_rows(prompts), np.concatenate(prompts)]).astype(np.int64),
        np.stack([_rows(answers), np.concatenate(answers), np.concatenate(counts)]).astype(np.int64),
        np.stack([_rows(biased), np.concatenate(biased)]).astype(np.int64),
        biases.astype(np.float64),
    ]


def _rows(parts: list[NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def penalised(logits: Tensor, last: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """A changed copy of logits fp32 [rows, vocab_size]. `last` [rows]: the token before each sampled one; `arrays`: of
    `penalty_arrays`."""
    params, prompts, answers, biased, biases = arrays
    repetition, frequency, presence, adds_last = params.unsqueeze(2)
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    counts.index_put_((answers[0], answers[1]), answers[2].int())
    counts.scatter_add_(1, last.unsqueeze(1), adds_last.int())
    generated = counts > 0
    seen = generated.index_put((prompts[0], prompts[1]), torch.ones((), dtype=torch.bool, device=logits.device))
    factor = repetition.float()
    row = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    row = torch.where(generated, row - (counts * frequency + presence).float(), row)
    bias = torch.zeros_like(row).index_put_((biased[0], biased[1]), biases.float())
    return row + bias
