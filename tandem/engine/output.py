"""What a step comes to: the best tokens are found on the device, and no more is copied to the host than is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.api import ScoredToken
from tandem.engine.step import SequenceStep
from tandem.engine.varlen_attention import to_device
from tandem.native.library import Kernels

Row = NDArray[np.float32]  # [vocab_size]

_NO_NUMBER: Final = -1  # in tensors alone


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Of each sequence that samples, in order: `best`, the token whose logit is largest, None where something is no
    number; `logits`, None where the best is all that is wanted. `scores` for each sequence with scored tokens."""

    best: list[int | None]
    logits: list[Row | None]
    scores: list[tuple[ScoredToken, ...]]


def best_of(logits: Tensor) -> Tensor:
    """[rows, vocab_size] → [rows] int64 for `step_output`. Of equals the lowest; no number counts as the largest."""
    best = logits.argmax(dim=1)
    return best.where(logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite(), _NO_NUMBER)


def best_of_any(logits: Tensor, kernels: Kernels | None) -> Tensor:
    """As `best_of`, where nothing is recorded: on the CPU by numpy, ten times as fast, or by all threads."""
    if logits.device.type != "cpu":
        return best_of(logits)
    if kernels is not None:
        return kernels.best(logits)
    values = logits.numpy()
    best = values.argmax(axis=1)
    return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(best)), best]), best, _NO_NUMBER))


def step_output(
    sequences: list[SequenceStep], logits: Tensor, best: Tensor, scores: list[tuple[ScoredToken, ...]]
) -> StepOutput:
    """Waits for the device, once. logits [samples, vocab_size] fp32; best [samples]: `best_of` them."""
    greedy = [sequence.greedy for sequence in sequences if sequence.samples]
    wanted = np.flatnonzero(~np.array(greedy, dtype=bool))
    if logits.device.type == "cpu":
        rows = iter([logits.numpy()[row] for row in wanted])
    else:
        picked, best = _on_host(logits[to_device(wanted, logits.device)], best)
        rows = iter(picked.numpy())
    return StepOutput(
        [None if token == _NO_NUMBER else token for token in best.tolist()],
        [None if is_greedy else next(rows) for is_greedy in greedy],
        scores,
    )


def _on_host(*tensors: Tensor) -> list[Tensor]:
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
