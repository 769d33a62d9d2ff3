"""Early exit: the model's first layers draft, and a head of their own says what they think.

After Elhoushi et al., "LayerSkip" (2024, arXiv:2404.16710), whose model is trained for it. For one that is not, a
linear map after the exit is fitted, as in the tuned lens of Belrose et al. (2023, arXiv:2303.08112).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tandem.engine.drafts.parts import Parts, Projection


@dataclass(frozen=True, slots=True)
class ExitHead:
    """norm [hidden], linear [hidden, hidden]"""

    project: Projection
    norm: Tensor
    eps: float
    linear: Tensor | None = None

    @classmethod
    def load(cls, parts: Parts, layers: int | None) -> ExitHead:
        """Raises CheckpointError also if it was trained for another layer."""
        if (trained := parts.config.positive_int("exit_layer")) != (layers or trained):
            raise parts.config.wrong("exit_layer", f"{layers}, as in engine.speculation_layers", trained)
        hidden = parts.model.config.hidden_size
        return cls(
            parts.projection("lm_head.weight"),
            parts.tensor("norm.weight", hidden),
            parts.model.config.rms_norm_eps,
            parts.tensor("linear.weight", hidden, hidden) if "linear.weight" in parts.tensors else None,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab_size]"""
        normed = F.rms_norm(hidden, self.norm.shape, self.norm, self.eps)
        return self.project(normed if self.linear is None else normed + F.linear(normed, self.linear))
