"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245).

A step's tokens lie in one flat row, whichever requests they belong to. The model knows no paging: `attend` writes keys
and values where the engine keeps them, and attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from tandem.model.layers import ColumnParallelLinear, LmHead, RmsNorm, RowParallelLinear, VocabEmbedding
from tandem.model.rope import Rope, Rotation, rotate
from tandem.model_config import ModelConfig


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v of the step's tokens, then attends causally, each request over its own tokens.

        q [tokens, heads / tp, head_dim]; k, v [tokens, rank_kv_heads, head_dim]; strided views, k and q rotated.
        Returns [tokens, heads / tp · head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: ColumnParallelLinear
    out: RowParallelLinear
    heads: int
    kv_heads: int
    head_dim: int

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] → q, k, v of this rank's heads, q and k rotated."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        turned = self.heads + self.kv_heads
        qk = rotate(qkv[:, :turned], rotation)
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:]


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    gate_up: ColumnParallelLinear
    down: RowParallelLinear

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp


class LlamaModel:
    """One rank's shard. Call under `torch.inference_mode`; ranks of a group call it in step, with the same tokens."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        embedding: VocabEmbedding,
        layers: Sequence[DecoderLayer],
        norm: RmsNorm,
        lm_head: LmHead,
    ) -> None:
        self.config = config
        self.layers = tuple(layers)
        self._rope = rope
        self._embedding = embedding
        self._norm = norm
        self._lm_head = lm_head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        attend: Attend,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The logits of some of a step's tokens: `logits` of those rows of `hidden`.

        Args:
            logits_rows: [rows] int64, which of the step's tokens need logits; may be empty.
        """
        return self.logits(self.hidden(token_ids, positions, attend, on_layer)[logits_rows])

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """What the layers make of a step's tokens.

        Args:
            token_ids: [tokens] int64, each below `vocab_size`.
            positions: [tokens] int64, each token's place in its own request.
            attend: keeps the KV cache and attends.
            on_layer: called with each layer's number as soon as its keys and values are in the pool.

        Returns:
            [tokens, hidden].
        """
        rotation = self._rope.rotation(positions)
        x = self._embedding(token_ids)
        for number, layer in enumerate(self.layers):
            q, k, v = layer.attention.project(layer.attention_norm(x), rotation)
            attended = attend(number, q, k, v)
            if on_layer is not None:
                on_layer(number)
            x = x + layer.attention.out(attended)
            x = x + layer.mlp(layer.mlp_norm(x))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab_size] fp32, equal on every rank."""
        return self._lm_head(self._norm(hidden))
