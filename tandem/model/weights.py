"""A rank's weights from a Hugging Face Llama checkpoint: which tensor goes where, and which part is the rank's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.model.checkpoint import Checkpoint
from tandem.model.layers import ColumnParallelLinear, LmHead, RmsNorm, RowParallelLinear, VocabEmbedding
from tandem.model.llama import Attention, DecoderLayer, LlamaModel, Mlp
from tandem.model.parallel import TensorParallel
from tandem.model.rope import Rope
from tandem.model_config import ModelConfig

# Buffers that old writers saved; the model computes them itself.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


def load_model(
    model_dir: Path, config: ModelConfig, tp: TensorParallel, device: torch.device | str, dtype: torch.dtype
) -> LlamaModel:
    """Reads only this rank's slices.

    Raises ConfigError when the model does not divide by `tp.size`, CheckpointError naming tensor and file when a
    tensor is missing, of a wrong shape, unreadable, not finite, or of no place in this architecture.
    """
    config.check_tp(tp.size)
    device = torch.device(device)
    with Checkpoint.open(model_dir) as checkpoint, torch.inference_mode():
        reader = _Reader(checkpoint, config, tp, device, dtype)
        embedding = reader.embedding()
        layers = [reader.layer(number) for number in range(config.layers)]
        norm = reader.norm("model.norm.weight")
        lm_head = reader.lm_head(embedding)
        _refuse_unknown(checkpoint, config)
    return LlamaModel(config, Rope(config, device, dtype), embedding, layers, norm, lm_head)


def _refuse_unknown(checkpoint: Checkpoint, config: ModelConfig) -> None:
    known = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(checkpoint.unread - known):
        if not _IGNORED.fullmatch(name):
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: expected the tensors of {config.architecture} with {config.layers} "
                f"layers, got also {name}"
            )


@dataclass(frozen=True, slots=True)
class _Reader:
    checkpoint: Checkpoint
    config: ModelConfig
    tp: TensorParallel
    device: torch.device
    dtype: torch.dtype

    def embedding(self) -> VocabEmbedding:
        return VocabEmbedding(self._vocab_rows("model.embed_tokens.weight"), self._vocab_sharded, self.tp)

    def lm_head(self, embedding: VocabEmbedding) -> LmHead:
        tied = self.config.tie_word_embeddings
        weight = embedding.weight if tied else self._vocab_rows("lm_head.weight")
        return LmHead(weight, self._vocab_sharded, self.tp)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._placed([self.checkpoint.read(name, [self.config.hidden_size])]), self.config.rms_norm_eps)

    def layer(self, number: int) -> DecoderLayer:
        prefix = f"model.layers.{number}."
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn."),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            mlp=self._mlp(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> Attention:
        config, bias = self.config, self.config.attention_bias
        heads = self._head_rows(self.tp.shard(config.heads))
        kv_heads = self._head_rows(self._kv_heads())
        query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = [("q_proj", query_rows, heads), ("k_proj", kv_rows, kv_heads), ("v_proj", kv_rows, kv_heads)]
        return Attention(
            qkv=self._columns(prefix, parts, bias),
            out=self._rows(prefix + "o_proj", query_rows, heads, bias),
            heads=config.heads // self.tp.size,
            kv_heads=config.rank_kv_heads(self.tp.size),
            head_dim=config.head_dim,
        )

    def _mlp(self, prefix: str) -> Mlp:
        width, bias = self.config.intermediate_size, self.config.mlp_bias
        shard = self.tp.shard(width)
        return Mlp(
            gate_up=self._columns(prefix, [("gate_proj", width, shard), ("up_proj", width, shard)], bias),
            down=self._rows(prefix + "down_proj", width, shard, bias),
        )

    def _kv_heads(self) -> slice:
        """Whole KV heads of this rank; the one its query heads need, where each is replicated."""
        count = self.config.kv_heads
        if count >= self.tp.size:
            return self.tp.shard(count)
        head = self.tp.rank * count // self.tp.size
        return slice(head, head + 1)

    def _head_rows(self, heads: slice) -> slice:
        return slice(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)

    def _columns(self, prefix: str, parts: Sequence[tuple[str, int, slice]], bias: bool) -> ColumnParallelLinear:
        """Several projections of the same input as one matrix: one product instead of three."""
        hidden, read = self.config.hidden_size, self.checkpoint.read
        weights = [read(f"{prefix}{name}.weight", [rows, hidden], rows=own) for name, rows, own in parts]
        biases = [read(f"{prefix}{name}.bias", [rows], rows=own) for name, rows, own in parts] if bias else []
        return ColumnParallelLinear(self._placed(weights), self._placed(biases) if bias else None)

    def _rows(self, name: str, width: int, own: slice, bias: bool) -> RowParallelLinear:
        hidden, read = self.config.hidden_size, self.checkpoint.read
        weight = self._placed([read(f"{name}.weight", [hidden, width], columns=own)])
        return RowParallelLinear(weight, self._placed([read(f"{name}.bias", [hidden])]) if bias else None, self.tp)

    @property
    def _vocab_sharded(self) -> bool:
        return self.tp.size > 1 and self.config.vocab_size % self.tp.size == 0

    def _vocab_rows(self, name: str) -> Tensor:
        shape = [self.config.vocab_size, self.config.hidden_size]
        own = self.tp.shard(self.config.vocab_size) if self._vocab_sharded else None
        return self._placed([self.checkpoint.read(name, shape, rows=own)])

    def _placed(self, parts: Sequence[Tensor]) -> Tensor:
        """Owned memory on the device: safetensors may hand out views of the mapped file, which could shrink."""
        joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
        return joined.to(device=self.device, dtype=self.dtype)
