"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): Llama's layers, with fused projections."""

from __future__ import annotations

from tandem.model.decoder import DecoderLayer
from tandem.model.reader import WeightReader


def layer(reader: WeightReader, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    return DecoderLayer(
        attention_norm=reader.norm(prefix + "input_layernorm"),
        attention=reader.attention(prefix + "self_attn.", fused=True),
        mlp_norm=reader.norm(prefix + "post_attention_layernorm"),
        mlp=reader.mlp(prefix + "mlp.", fused=True),
    )
