"""The layers of a transformer, each with its tensor parallelism inside. Weights are passed in, sharded already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from tandem.model.parallel import TensorParallel
from tandem.model_families import Activation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Zhang and Sennrich 2019, arXiv:1910.07467. weight [width]; in fp32 it is also applied in fp32 (Gemma)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] → the same; the mean square is taken in fp32."""
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(self.weight.dtype).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """Each rank holds some outputs. weight [out / tp, in], bias [out / tp]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out / tp]"""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """Each rank holds some inputs, and the ranks' results are summed. weight [out, in / tp], bias [out]."""

    weight: Tensor
    bias: Tensor | None
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in / tp] → [tokens, out], equal on every rank."""
        y = self.tp.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class VocabEmbedding:
    """weight [rows, hidden]: all of the vocabulary, or this rank's equal part of it when `sharded`."""

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
    """weight [rows, hidden]: all of the vocabulary, or this rank's equal part of it when `sharded`."""

    weight: Tensor
    sharded: bool
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32, equal on every rank."""
        logits = F.linear(x, self.weight)
        return (self.tp.all_gather_columns(logits) if self.sharded else logits).float()


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU and its like (Shazeer 2020, arXiv:2002.05202)."""

    gate_up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → the same, equal on every rank."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(ACTIVATIONS[self.activation](gate).mul_(up))
