"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.model_families import Activation
from tandem.model.matrices import Matrix
from tandem.model.ops import Ops
from tandem.model.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Each rank holds an equal number of whole experts, from `first` on. All ranks route all tokens in the same way.

    gate [experts, hidden]; per expert of the rank, gate_up [2 · expert_size, hidden] and down [hidden, expert_size].
    """

    gate: Matrix
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    first: int
    per_token: int
    renormalise: bool
    activation: Activation
    ops: Ops
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → the same, equal on every rank. A token's experts are summed in order of their numbers."""
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for local, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            tokens, places = (chosen == self.first + local).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            answer = down(self.ops.gated(gate_up(x[tokens]), self.activation))
            out.index_add_(0, tokens, answer.mul_(weights[tokens, places].unsqueeze(1)))
        return self.tp.all_reduce(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → weights and expert numbers, each [tokens, per_token]."""
        scores = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.per_token, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
