"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral's attention, experts in every layer."""

from __future__ import annotations

from tandem.model.decoder import DecoderLayer
from tandem.model.reader import WeightReader


def layer(reader: WeightReader, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    return DecoderLayer(
        attention_norm=reader.norm(prefix + "input_layernorm"),
        attention=reader.attention(prefix + "self_attn."),
        mlp_norm=reader.norm(prefix + "post_attention_layernorm"),
        mlp=reader.experts(prefix + "block_sparse_moe.", gate="w1", up="w3", down="w2"),
    )
