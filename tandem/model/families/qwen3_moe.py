"""Qwen3 with experts (Qwen Team 2025, arXiv:2505.09388); some layers may keep a plain MLP."""

from __future__ import annotations

from tandem.model.decoder import DecoderLayer
from tandem.model.experts import SparseMlp
from tandem.model.layers import GatedMlp
from tandem.model.reader import WeightReader


def layer(reader: WeightReader, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    return DecoderLayer(
        attention_norm=reader.norm(prefix + "input_layernorm"),
        attention=reader.attention(prefix + "self_attn."),
        mlp_norm=reader.norm(prefix + "post_attention_layernorm"),
        mlp=_mlp(reader, prefix + "mlp.", number),
    )


def _mlp(reader: WeightReader, prefix: str, number: int) -> GatedMlp | SparseMlp:
    if reader.is_sparse(number):
        return reader.experts(prefix, gate="gate_proj", up="up_proj", down="down_proj")
    return reader.mlp(prefix)
