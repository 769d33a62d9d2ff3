"""How to read each architecture's layers from a checkpoint. `tandem/checkpoint/model_families.py` reads its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tandem.model.decoder import DecoderLayer
from tandem.model.families import gemma, llama, mixtral, phi3, qwen3_moe
from tandem.model.reader import WeightReader

LAYERS: Mapping[str, Callable[[WeightReader, int], DecoderLayer]] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.layer,
        "MistralForCausalLM": llama.layer,
        "Qwen2ForCausalLM": llama.layer,
        "Qwen3ForCausalLM": llama.layer,
        "Qwen3MoeForCausalLM": qwen3_moe.layer,
        "Gemma2ForCausalLM": gemma.layer,
        "Gemma3ForCausalLM": gemma.layer,
        "Phi3ForCausalLM": phi3.layer,
        "MixtralForCausalLM": mixtral.layer,
    }
)
