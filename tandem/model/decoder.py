"""A decoder-only transformer, with what all families share.

A step's tokens form one flat row, whatever requests they belong to. The model is independent of paging: `attend` stores
keys and values for the engine, and attends. Each family reads its own layers (`tandem/model/families/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.model.experts import SparseMlp
from tandem.model.layers import ColumnParallelLinear, GatedMlp, LmHead, RmsNorm, RowParallelLinear, VocabEmbedding
from tandem.model.ops import Ops
from tandem.model.rope import Rope, Rotation


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v of the step's tokens, then attends causally within each request, by the model's
        `AttentionParams`.

        q [tokens, heads / tp, head_dim]; k, v [tokens, rank_kv_heads, head_dim]; strided views, k and q rotated.
        Returns [tokens, heads / tp · head_dim].
        """
        ...


class StoringAttend(Attend, Protocol):
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Only stores k and v of the step's tokens."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a model's attention.

    Args:
        heads: this rank's query heads.
        scale: factor of q·k.
        softcap: scores become softcap · tanh(score / softcap), before the mask.
        windows: per layer, how many tokens a query sees, itself included; None: all before it.
    """

    heads: int
    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Has both `q_norm` and `k_norm` or neither. weight [head_dim]."""

    qkv: ColumnParallelLinear
    out: RowParallelLinear
    heads: int
    kv_heads: int
    head_dim: int
    ops: Ops
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] → q, k, v of this rank's heads, q and k rotated."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        turned = self.heads + self.kv_heads
        qk = qkv[:, :turned]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), dim=1)
        qk = self.ops.rotate(qk, rotation)
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Adds the outputs of attention and MLP to the residual stream, normalised first if there is an `…_output_norm`."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp | SparseMlp
    attention_output_norm: RmsNorm | None = None
    mlp_output_norm: RmsNorm | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """The model without its layers."""

    embedding: VocabEmbedding
    norm: RmsNorm
    lm_head: LmHead


class Decoder:
    """One rank's shard. Call it under `torch.inference_mode`, on all ranks of a group in step, with the same tokens.

    Args:
        ropes: one, or two if layers with a window use the second.
    """

    def __init__(
        self,
        config: ModelConfig,
        ropes: Sequence[Rope],
        embedding_and_head: EmbeddingAndHead,
        layers: Sequence[DecoderLayer],
    ) -> None:
        traits = config.traits
        self.config = config
        self.layers = tuple(layers)
        self.attention = AttentionParams(
            heads=self.layers[0].attention.heads,
            scale=traits.query_scale or config.head_dim**-0.5,
            softcap=traits.attention_softcap,
            windows=traits.windows,
        )
        self._ropes = tuple(ropes)
        self._rope_of = tuple(int(window is not None) * (len(self._ropes) - 1) for window in traits.windows)
        self._ends = embedding_and_head
        self._embedding_scale = traits.embedding_scale
        self._softcap = traits.logits_softcap

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        attend: Attend,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The logits of the rows `logits_rows` of a step's tokens.

        Args:
            logits_rows: [rows] int64, indices of the tokens that need logits; may be empty.
        """
        return self.logits(self.hidden(token_ids, positions, attend, on_layer)[logits_rows])

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        on_layer: Callable[[int], None] | None = None,
        layers: int | None = None,
        rows: Tensor | None = None,
        entered: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """The hidden states of a step's tokens after all layers, or after the first `layers`.

        Args:
            token_ids: [tokens] int64, each below `vocab_size`.
            positions: [tokens] int64, each token's position in its request.
            attend: stores the KV cache and attends.
            on_layer: called with each layer's number once its keys and values are in the pool.
            rows: [rows] int64, the tokens whose hidden states are needed; None: all. Of the last layer, only they are
                computed beyond attention, so the first token of a long prompt comes soon after its KV.
            entered: called with each layer's number but the first one's, and the hidden states [tokens, hidden] that
                it gets.

        Returns:
            [tokens, hidden], or [rows, hidden].
        """
        rotations = [rope.rotation(positions) for rope in self._ropes]
        x = self.embedded(token_ids)
        added: Tensor | None = None  # to x, by the layer before
        chosen = self.layers[:layers]
        for number, layer in enumerate(chosen):
            norm = layer.attention_norm
            x, normed = (x, norm(x)) if added is None else norm.of_sum(x, added)
            if entered is not None and number:
                entered(number, x)
            q, k, v = layer.attention.project(normed, rotations[self._rope_of[number]])
            attended = attend(number, q, k, v)
            if on_layer is not None:
                on_layer(number)
            if rows is not None and number == len(chosen) - 1:
                x, attended = x[rows], attended[rows]
                if not len(rows):
                    return x
            added = _normed(layer.attention.out(attended), layer.attention_output_norm)
            x, normed = layer.mlp_norm.of_sum(x, added)
            added = _normed(layer.mlp(normed), layer.mlp_output_norm)
        return x if added is None else x + added

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden], as the first layer gets them."""
        x = self._ends.embedding(token_ids)
        if self._embedding_scale != 1.0:
            x = x * torch.tensor(self._embedding_scale, dtype=x.dtype)  # rounded to the dtype, as in training
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → the same, as the head gets it."""
        return self._ends.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab_size] fp32, equal on every rank."""
        return self.logits_of_normed(self.normed(hidden))

    def logits_of_normed(self, normed: Tensor) -> Tensor:
        """As `logits`, of hidden states with another norm."""
        logits = self._ends.lm_head(normed)
        return logits if self._softcap is None else (logits / self._softcap).tanh_().mul_(self._softcap)


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    return x if norm is None else norm(x)
