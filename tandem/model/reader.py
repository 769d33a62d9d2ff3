"""Reads a rank's part of a checkpoint. The families name tensors; this module slices them and places them on the
device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.model.checkpoint import Checkpoint
from tandem.model.decoder import Attention, EmbeddingAndHead
from tandem.model.experts import SparseMlp, choose_experts
from tandem.model.layers import ColumnParallelLinear, GatedMlp, LmHead, RmsNorm, RowParallelLinear, VocabEmbedding
from tandem.model.matrices import Matrix, MatrixMaker, Weights
from tandem.model.ops import Ops
from tandem.model.parallel import TensorParallel
from tandem.native.library import GROUP


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `own` of tensor `name`, which has `total` rows."""

    name: str
    total: int
    own: slice


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads only this rank's slices. Each method raises CheckpointError naming tensor and file."""

    checkpoint: Checkpoint
    config: ModelConfig
    tp: TensorParallel
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    matrix: MatrixMaker

    def embedding_and_head(self) -> EmbeddingAndHead:
        embedding = self.matrix.keep(self._vocab_rows("model.embed_tokens.weight"))
        head = embedding if self.config.tie_word_embeddings else self._vocab_rows("lm_head.weight")
        return EmbeddingAndHead(
            VocabEmbedding(embedding, self._vocab_sharded, self.tp),
            self.norm("model.norm"),
            LmHead(self.matrix.of_vocabulary(head), self._vocab_sharded, self.tp),
        )

    def norm(self, name: str, width: int | None = None) -> RmsNorm:
        """`width` None: the hidden size."""
        weight = self._placed([self.checkpoint.read(f"{name}.weight", [width or self.config.hidden_size])])
        if offset := self.config.traits.norm_offset:
            weight = weight.float() + offset
        return RmsNorm(weight, self.config.rms_norm_eps, self.ops)

    def attention(self, prefix: str, *, fused: bool = False, width: int | None = None) -> Attention:
        """`fused`: queries, keys and values are in one tensor, `qkv_proj`. `width`: of its input; None: the hidden
        size."""
        config, traits = self.config, self.config.traits
        query, key, value = self._head_parts(fused)
        return Attention(
            qkv=self._columns(prefix, [query, key, value], traits.qkv_bias, width),
            out=self._rows(prefix + "o_proj", config.heads * config.head_dim, self._query_rows, traits.out_bias),
            heads=config.heads // self.tp.size,
            kv_heads=config.rank_kv_heads(self.tp.size),
            head_dim=config.head_dim,
            ops=self.ops,
            q_norm=self.norm(prefix + "q_norm", config.head_dim) if traits.qk_norm else None,
            k_norm=self.norm(prefix + "k_norm", config.head_dim) if traits.qk_norm else None,
        )

    def mlp(self, prefix: str, *, fused: bool = False) -> GatedMlp:
        """`fused`: both projections are in one tensor, `gate_up_proj`."""
        width, bias = self.config.intermediate_size, self.config.traits.mlp_bias
        own = self.tp.shard(width)
        if fused:
            gate, up = (Rows("gate_up_proj", 2 * width, _moved(own, start)) for start in (0, width))
        else:
            gate, up = Rows("gate_proj", width, own), Rows("up_proj", width, own)
        return GatedMlp(
            gate_up=self._columns(prefix, [gate, up], bias),
            down=self._rows(prefix + "down_proj", width, own, bias),
            activation=self.config.traits.activation,
            ops=self.ops,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts in place of the MLP."""
        experts = self.config.traits.experts
        return experts is not None and experts.sparse[layer]

    def experts(self, prefix: str, *, gate: str, up: str, down: str) -> SparseMlp:
        """`gate`, `up`, `down`: the family's names of an expert's projections."""
        experts = self.config.traits.experts
        if experts is None:
            raise CheckpointError(f"{self.config.architecture}: expected experts in config.json, found none")
        hidden, size, read = self.config.hidden_size, experts.expert_size, self.checkpoint.read
        own = self.tp.shard(experts.count)
        for number in (*range(own.start), *range(own.stop, experts.count)):
            for name in (gate, up, down):
                self.checkpoint.leave(f"{prefix}experts.{number}.{name}.weight")

        def each(names: Sequence[str], shape: Sequence[int]) -> tuple[Matrix, ...]:
            return tuple(
                self.matrix(self._placed([read(f"{prefix}experts.{number}.{name}.weight", shape) for name in names]))
                for number in range(own.start, own.stop)
            )

        # Routing depends on small differences, so these few weights are never quantised.
        exact = replace(self.matrix, weights=Weights.DENSE)
        return SparseMlp(
            gate=exact(self._placed([read(f"{prefix}gate.weight", [experts.count, hidden])])),
            experts=choose_experts(
                each([gate, up], [size, hidden]), each([down], [hidden, size]), self.config.traits.activation, self.ops
            ),
            first=own.start,
            count=own.stop - own.start,
            per_token=experts.per_token,
            renormalise=experts.renormalise,
            tp=self.tp,
        )

    @property
    def _query_rows(self) -> slice:
        return self._rows_of_heads(self.tp.shard(self.config.heads))

    def _head_parts(self, fused: bool) -> tuple[Rows, Rows, Rows]:
        query, key_value = self._query_rows, self._rows_of_heads(self._kv_heads())
        query_rows, kv_rows = self.config.heads * self.config.head_dim, self.config.kv_heads * self.config.head_dim
        if not fused:
            return (
                Rows("q_proj", query_rows, query),
                Rows("k_proj", kv_rows, key_value),
                Rows("v_proj", kv_rows, key_value),
            )
        total = query_rows + 2 * kv_rows
        return (
            Rows("qkv_proj", total, query),
            Rows("qkv_proj", total, _moved(key_value, query_rows)),
            Rows("qkv_proj", total, _moved(key_value, query_rows + kv_rows)),
        )

    def _kv_heads(self) -> slice:
        """This rank's whole KV heads, or the one that its query heads need if heads are replicated."""
        count = self.config.kv_heads
        if count >= self.tp.size:
            return self.tp.shard(count)
        head = self.tp.rank * count // self.tp.size
        return slice(head, head + 1)

    def _rows_of_heads(self, heads: slice) -> slice:
        return slice(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)

    def _columns(
        self, prefix: str, parts: Sequence[Rows], bias: bool, width: int | None = None
    ) -> ColumnParallelLinear:
        """Several projections of the same input as one matrix, to compute one product instead of three."""
        width, read = width or self.config.hidden_size, self.checkpoint.read
        weights = [read(f"{prefix}{part.name}.weight", [part.total, width], rows=part.own) for part in parts]
        biases = [read(f"{prefix}{part.name}.bias", [part.total], rows=part.own) for part in parts] if bias else []
        return ColumnParallelLinear(self.matrix(self._placed(weights), self._placed(biases) if bias else None))

    def _rows(self, name: str, width: int, own: slice, bias: bool) -> RowParallelLinear:
        hidden, read = self.config.hidden_size, self.checkpoint.read
        weight = self._placed([read(f"{name}.weight", [hidden, width], columns=own)])
        self._check_groups(name, width, own)
        largest = None
        if self.matrix.weights.row_dtype is not None and self.tp.size > 1:  # of whole rows, so independent of tp
            whole = read(f"{name}.weight", [hidden, width])
            largest = torch.linalg.vector_norm(whole, ord=torch.inf, dim=1).float()
        matrix = self.matrix(weight, largest=largest)
        return RowParallelLinear(matrix, self._placed([read(f"{name}.bias", [hidden])]) if bias else None, self.tp)

    def _check_groups(self, name: str, width: int, own: slice) -> None:
        is_part = own.stop - own.start < width
        if self.matrix.weights is Weights.INT4 and is_part and (own.start % GROUP or own.stop % GROUP):
            raise ConfigError(
                f"engine.weights: int4 groups {GROUP} inputs, but tp {self.tp.size} splits the {width} of {name} "
                "inside a group: set another tp, or int8",
                field="engine.weights",
            )

    @property
    def _vocab_sharded(self) -> bool:
        return self.tp.size > 1 and self.config.vocab_size % self.tp.size == 0

    def _vocab_rows(self, name: str) -> Tensor:
        shape = [self.config.vocab_size, self.config.hidden_size]
        own = self.tp.shard(self.config.vocab_size) if self._vocab_sharded else None
        return self._placed([self.checkpoint.read(name, shape, rows=own)])

    def _placed(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins parts on the device. On a CPU, safetensors may return views of the mapped file, which could shrink."""
        is_view = len(parts) == 1 and parts[0].device.type == "cpu"
        converted = [
            part.to(self.device, self.dtype, copy=is_view, memory_format=torch.contiguous_format) for part in parts
        ]
        return torch.cat(converted) if len(converted) > 1 else converted[0]


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
