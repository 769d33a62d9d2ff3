"""Transformer layers, each with its own tensor parallelism. They receive sharded weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tandem.checkpoint.model_families import Activation
from tandem.model.matrices import Matrix
from tandem.model.ops import Ops
from tandem.model.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Zhang and Sennrich 2019, arXiv:1910.07467. weight [width]; an fp32 weight is applied in fp32 (Gemma)."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] → the same; the mean square is taken in fp32."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """x + added, both [tokens, width], and the norm of this sum."""
        return self.ops.rms_norm_of_sum(x, added, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """Each rank computes some outputs. matrix [out / tp, in], with its bias."""

    matrix: Matrix

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out / tp]"""
        return self.matrix(x)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """Each rank has some inputs, and the ranks' results are summed. matrix [out, in / tp], bias [out]."""

    matrix: Matrix
    bias: Tensor | None
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in / tp] → [tokens, out], equal on every rank."""
        y = self.tp.all_reduce(self.matrix(x))
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class VocabEmbedding:
    """weight [rows, hidden]: the whole vocabulary, or this rank's equal part if `sharded`."""

    weight: Tensor
    sharded: bool
    tp: TensorParallel

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden], equal on every rank."""
        if not self.sharded:
            return F.embedding(token_ids, self.weight)
        rows = self.weight.shape[0]
        local = token_ids - self.tp.rank * rows
        foreign = (local < 0) | (local >= rows)
        hidden = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill_(foreign.unsqueeze(1), 0))


@dataclass(frozen=True, slots=True)
class LmHead:
    """matrix [rows, hidden]: the whole vocabulary, or this rank's equal part if `sharded`."""

    matrix: Matrix
    sharded: bool
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32, equal on every rank."""
        logits = self.matrix(x)
        return (self.tp.all_gather_columns(logits) if self.sharded else logits).float()


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU and similar MLPs (Shazeer 2020, arXiv:2002.05202)."""

    gate_up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → the same, equal on every rank."""
        return self.down(self.ops.gated(self.gate_up(x), self.activation))
