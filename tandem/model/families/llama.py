"""Llama 2 and 3 and SmolLM2 (Touvron et al. 2023, arXiv:2307.09288), and families with the same layers: Mistral, Qwen2
and Qwen3. Their differences (windows, biases, norms of queries and keys) are traits of the config."""

from __future__ import annotations

from tandem.model.decoder import DecoderLayer
from tandem.model.reader import WeightReader


def layer(reader: WeightReader, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    return DecoderLayer(
        attention_norm=reader.norm(prefix + "input_layernorm"),
        attention=reader.attention(prefix + "self_attn."),
        mlp_norm=reader.norm(prefix + "post_attention_layernorm"),
        mlp=reader.mlp(prefix + "mlp."),
    )
