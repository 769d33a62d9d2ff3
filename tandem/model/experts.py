"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088).

A step's rows are sorted by expert once, so that each expert's rows are contiguous, and returned to their tokens after
the products.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.checkpoint.model_families import Activation
from tandem.model.matrices import Dense, Matrix
from tandem.model.ops import Ops
from tandem.model.parallel import TensorParallel

_TOLERANCE: Final = 0.02  # relative to a row's norm; rounding in half precision stays below half of it

logger = logging.getLogger(__name__)


class Groups:
    """Which of the sorted rows are whose.

    Args:
        ends: [experts] int32, where the rows of each of the rank's experts end. Rows of other ranks' experts follow.
    """

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends

    @cached_property
    def borders(self) -> list[int]:
        """[experts + 1], on the host: where each expert's rows begin and end. Waits for the device."""
        return [0, *self.ends.tolist()]


class Experts(Protocol):
    """The MLPs of the rank's experts."""

    def __call__(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """rows [rows, hidden], sorted by expert → each expert's answers to its own, times weights [rows, 1], perhaps in
        the memory of `rows`. Answers beyond the last group are undefined, or left out."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Products of any kind of matrix, expert by expert: intermediate results stay in a CPU's cache. On a GPU the
    host waits for the device once.

    Per expert, gate_up [2 · expert_size, hidden] and down [hidden, expert_size].
    """

    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    activation: Activation
    ops: Ops

    def __call__(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        for gate_up, down, (begin, end) in zip(self.gate_up, self.down, pairwise(groups.borders), strict=True):
            if end > begin:
                own = rows[begin:end]
                torch.mul(down(self.ops.gated(gate_up(own), self.activation)), weights[begin:end], out=own)
        return rows[: groups.borders[-1]]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Products of all experts in one launch each, without waiting for the device.

    gate_up [experts, 2 · expert_size, hidden], down [experts, hidden, expert_size].
    """

    gate_up: Tensor
    down: Tensor
    activation: Activation
    ops: Ops

    def __call__(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        gated = self.ops.gated(F.grouped_mm(rows, self.gate_up.mT, offs=groups.ends), self.activation)
        return F.grouped_mm(gated, self.down.mT, offs=groups.ends).mul_(weights)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Each rank holds `count` whole experts, from number `first` on. All ranks route all tokens in the same way.

    gate [experts of all ranks, hidden].
    """

    gate: Matrix
    experts: Experts
    first: int
    count: int
    per_token: int
    renormalise: bool
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → the same, equal on every rank. A token's sum does not depend on other tokens."""
        weights, chosen = self._route(x)
        local = chosen.flatten() - self.first
        local = local.where((local >= 0) & (local < self.count), self.count)  # other ranks' experts come last
        numbers, order = local.sort(stable=True)
        ends = torch.searchsorted(numbers, torch.arange(self.count, device=x.device), right=True, out_int32=True)
        by_row = weights.flatten()[order].unsqueeze(1)
        answers = self.experts(x[order // self.per_token], by_row, Groups(ends))
        own = order[: len(answers)]
        if x.device.type == "cpu":  # adds in order of the rows, and so of the experts' numbers
            return self.tp.all_reduce(torch.zeros_like(x).index_add_(0, own // self.per_token, answers))
        is_foreign = numbers[: len(answers)] == self.count
        return self.tp.all_reduce(added_in_order(answers, own, is_foreign, chosen.shape))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → weights and expert numbers, each [tokens, per_token]."""
        scores = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.per_token, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


def added_in_order(answers: Tensor, own: Tensor, is_foreign: Tensor, shape: torch.Size) -> Tensor:
    """Sums of each token's answers, one expert after the other: a GPU's `index_add_` adds in any order.

    answers [rows, hidden]; own [rows] int64, a row's place in `shape` = (tokens, per_token); is_foreign [rows], whether
    the answer is another rank's → [tokens, hidden].
    """
    answers = answers.masked_fill_(is_foreign.unsqueeze(1), 0)
    places = answers.new_zeros(shape.numel(), answers.shape[1]).index_copy_(0, own, answers)
    total, *others = places.view(*shape, -1).unbind(1)
    total = total.contiguous()
    for other in others:
        total += other
    return total


def choose_experts(
    gate_up: Sequence[Matrix], down: Sequence[Matrix], activation: Activation, ops: Ops
) -> SeparateExperts | StackedExperts:
    """Matrices as in `SeparateExperts`. On a GPU, dense ones are stacked if it multiplies them correctly."""
    first, last = gate_up[0], down[0]
    if isinstance(first, Dense) and isinstance(last, Dense) and first.weight.is_cuda:
        sizes = (first.weight.shape, last.weight.shape)
        if _can_group(sizes, first.weight.dtype, first.weight.device):
            return StackedExperts(_stacked(gate_up), _stacked(down), activation, ops)
    return SeparateExperts(tuple(gate_up), tuple(down), activation, ops)


def _stacked(matrices: Sequence[Matrix]) -> Tensor:
    return torch.stack([each.weight for each in matrices if isinstance(each, Dense)])


@cache
def _can_group(sizes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> bool:
    wrong = [error for size in sizes if (error := grouped_error(size, dtype, device)) is not None]
    if wrong:
        logger.warning("experts are multiplied one by one, and the host waits for each layer: %s", wrong[0])
    return not wrong


@contextmanager
def _without_waiting(device: torch.device) -> Iterator[None]:
    """An operation for which the host would wait for a GPU raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def grouped_error(size: torch.Size, dtype: torch.dtype, device: torch.device) -> str | None:
    """The error of torch's grouped product of matrices of this size [out, in] against single ones, with an empty group
    and rows beyond the last group; None if it is correct and, on a GPU, the host does not wait for it."""
    generator = torch.Generator(device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    ends = [0, 1, 40, 70]
    try:
        rows, matrices = some(72, size[1]), some(len(ends), *size)
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        with _without_waiting(device):
            got = F.grouped_mm(rows, matrices.mT, offs=offs)
        right = [
            rows[begin:end] @ matrix.t() for matrix, (begin, end) in zip(matrices, pairwise([0, *ends]), strict=True)
        ]
        wide = torch.cat(right).float()
        worst = float(((got[: len(wide)].float() - wide).norm(dim=1) / wide.norm(dim=1)).max())  # NaN if any is
    except Exception as error:  # no such kernel for this GPU, dtype or size
        return f"{type(error).__name__}: {error}"
    return None if worst < _TOLERANCE else f"results differ by {worst:.3g} of their norm"
