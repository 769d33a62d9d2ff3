"""Gemma 2 and 3, text (Gemma Team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786): four norms in each layer.

Score and logit caps, windows in most layers and two ropes (Gemma 3) are traits of the config.
"""

from __future__ import annotations

from tandem.model.decoder import DecoderLayer
from tandem.model.reader import WeightReader


def layer(reader: WeightReader, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    return DecoderLayer(
        attention_norm=reader.norm(prefix + "input_layernorm"),
        attention=reader.attention(prefix + "self_attn."),
        attention_output_norm=reader.norm(prefix + "post_attention_layernorm"),
        mlp_norm=reader.norm(prefix + "pre_feedforward_layernorm"),
        mlp=reader.mlp(prefix + "mlp."),
        mlp_output_norm=reader.norm(prefix + "post_feedforward_layernorm"),
    )
