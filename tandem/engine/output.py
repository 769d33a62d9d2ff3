"""A step's output: tokens are chosen on the device, and only what is needed is copied to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.api import ScoredToken
from tandem.engine.attention.varlen_attention import to_device
from tandem.engine.device_sampler import sample_on_device
from tandem.engine.step import SequenceStep
from tandem.native.library import Kernels

Row = NDArray[np.float32]  # [vocab_size]

_NOT_FINITE: Final = -1  # only in tensors


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output for each sequence that samples, in order.

    `tokens`: the token drawn on the device, else the one with the largest logit; None if logits are not finite.
    `logits`: None if that token is all that is needed. `scores`: for each sequence with scored tokens.
    """

    tokens: list[int | None]
    logits: list[Row | None]
    scores: list[tuple[ScoredToken, ...]]


def best_of(logits: Tensor) -> Tensor:
    """[rows, vocab_size] → [rows] int64 for `launched`. Ties go to the lowest id; NaN counts as largest."""
    best = logits.argmax(dim=1)
    return best.where(logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite(), _NOT_FINITE)


def best_of_any(logits: Tensor, kernels: Kernels | None) -> Tensor:
    """`best_of` outside recordings: on a CPU by native kernels or by numpy, which is ten times as fast."""
    if logits.device.type != "cpu":
        return best_of(logits)
    if kernels is not None:
        return kernels.best(logits)
    values = logits.numpy()
    best = values.argmax(axis=1)
    return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(best)), best]), best, _NOT_FINITE))


class Launched:
    """A step given to the device, and its output once it is done.

    `tokens` [samples] int64, on the device, as in StepOutput; valid until the next launch.
    """

    def __init__(
        self, tokens: Tensor, is_enough: list[bool], rows: Tensor, scores: list[tuple[ScoredToken, ...]]
    ) -> None:
        """`is_enough`: per sample, whether its token is all that is needed. `rows`: logits of the others."""
        self.tokens = tokens
        self._is_enough = is_enough
        self._scores = scores
        self._copies = [tokens.clone(), rows]
        self._done: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._copies = [_pinned_copy(each) for each in (tokens, rows)]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> StepOutput:
        """Waits until the device is done."""
        if self._done is not None:
            self._done.synchronize()
        tokens, rows = self._copies
        of_host = iter(rows.numpy())
        return StepOutput(
            [None if token == _NOT_FINITE else token for token in tokens.tolist()],
            [None if enough else next(of_host) for enough in self._is_enough],
            self._scores,
        )


def launched(
    sequences: list[SequenceStep],
    logits: Tensor,
    best: Tensor,
    scores: list[tuple[ScoredToken, ...]],
    *,
    draws: bool = False,
) -> Launched:
    """logits [samples, vocab_size] fp32; best [samples]: `best_of` them. `draws`: sample on the device where
    possible."""
    sampling = [sequence for sequence in sequences if sequence.samples]
    on_device = {row: each.draw for row, each in enumerate(sampling) if draws and each.draw is not None}
    if on_device:
        rows = to_device(np.array(list(on_device)), logits.device)
        drawn_tokens = sample_on_device(logits[rows], list(on_device.values()))
        best = best.index_copy(0, rows, drawn_tokens.where(best[rows] != _NOT_FINITE, _NOT_FINITE))
    is_enough = [each.greedy or row in on_device for row, each in enumerate(sampling)]
    wanted = np.flatnonzero(~np.array(is_enough, dtype=bool))
    return Launched(best, is_enough, logits[to_device(wanted, logits.device)], scores)


def _pinned_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
