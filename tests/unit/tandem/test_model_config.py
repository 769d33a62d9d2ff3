from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.model_config import ModelConfig, fingerprint
from tandem.checkpoint.model_families import Traits
from tandem.checkpoint.rope_config import LinearScaling, Llama3Scaling, RopeConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.testing.models import write_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def changed(folder: Path, **changes: Any) -> Path:
    """A tiny checkpoint whose config.json has these fields; None takes a field away."""
    write_tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return folder


def test_a_config_is_read_whole(tmp_path: Path) -> None:
    config = ModelConfig.load(write_tiny_llama(tmp_path, bos_token_id=1, eos_token_id=2, tie=True))
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_tokens=2048,
        bos_token_id=1,
        eos_token_ids=frozenset({2}),
        traits=Traits(windows=(None, None), rope=RopeConfig(theta=10_000.0, dims=16)),
    )


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    changed(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert ModelConfig.load(tmp_path).eos_token_ids == {2, 5, 7}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": LLAMA3}, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ],
)
def test_rope_scaling_is_read_in_its_older_form(changes: dict[str, Any], scaling: object, tmp_path: Path) -> None:
    config = ModelConfig.load(changed(tmp_path, rope_theta=500_000.0, **changes))
    assert (config.traits.rope.theta, config.traits.rope.scaling) == (500_000.0, scaling)


def test_rope_parameters_are_read_in_their_newer_form(tmp_path: Path) -> None:
    parameters = LLAMA3 | {"rope_theta": 500_000.0}
    config = ModelConfig.load(changed(tmp_path, rope_theta=None, rope_scaling=None, rope_parameters=parameters))
    assert (config.traits.rope.theta, config.traits.rope.scaling) == (500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def test_what_an_older_config_leaves_out_has_its_usual_value(tmp_path: Path) -> None:
    config = ModelConfig.load(changed(tmp_path, head_dim=None, num_key_value_heads=None, rope_theta=None))
    assert (config.head_dim, config.kv_heads, config.traits.rope.theta) == (16, 4, 10_000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: expected one of LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "MixtralForCausalLM (others by another engine: engine.kind: vllm), got None"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, got None"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, got '64'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected a positive integer, got -1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: expected at most"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 15}, "head_dim: expected an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number, got 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id"),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish, gelu_pytorch_tanh, got 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected none"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: expected default, "),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale: expected none"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1]}}, "short_factor: expected a list of 8 numbers"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: expected a share of head_dim (16)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor: expected a positive number"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor: expected more than"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.load(changed(tmp_path, **changes))
    assert f"config.json: {message}" in caught.value.message or message in caught.value.message
    assert "config.json" in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: expected"):
        ModelConfig.load(tmp_path)


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected this file in the checkpoint, found none"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "fitting"),
    [(4, 2, 128, (1, 2, 4)), (9, 3, 1536, (1, 3)), (8, 8, 96, (1, 2, 4, 8)), (6, 3, 96, (1, 3, 6)), (4, 4, 6, (1, 2))],
)
def test_fitting_tp_widths(
    heads: int, kv_heads: int, intermediate: int, fitting: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path, heads=heads, kv_heads=kv_heads, intermediate=intermediate)
    assert ModelConfig.load(folder).fitting_tps() == fitting


def test_a_width_that_does_not_fit_is_refused_with_those_that_do(tmp_path: Path) -> None:
    config = ModelConfig.load(write_tiny_llama(tmp_path))
    config.check_tp(4)
    for tp in (0, 3, 8):
        with pytest.raises(ConfigError, match=rf"tp: expected one of 1, 2, 4 .* got {tp}"):
            config.check_tp(tp)


def test_kv_heads_are_replicated_where_there_are_more_ranks(tmp_path: Path) -> None:
    config = ModelConfig.load(write_tiny_llama(tmp_path))
    assert [config.rank_kv_heads(tp) for tp in (1, 2, 4)] == [2, 1, 1]


def test_fingerprints_tell_checkpoints_apart_and_survive_a_copy(tmp_path: Path) -> None:
    one, same, other, context = (
        write_tiny_llama(tmp_path / "one"),
        write_tiny_llama(tmp_path / "same"),
        write_tiny_llama(tmp_path / "other", seed=1),
        write_tiny_llama(tmp_path / "context", max_positions=64),
    )
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(one), fingerprint(other), fingerprint(context)}) == 3
    assert len(fingerprint(one)) == 32


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors files"):
        fingerprint(tmp_path)


def nested(folder: Path, **text: Any) -> Path:
    """A model of text and images, as LLaVA's config has it."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "eos_token_id": 7,
        "text_config": text,
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 3},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_any_model_has_sizes_for_another_engine(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 99}
    config = ModelConfig.of_any(nested(tmp_path, model_type="other", num_key_value_heads=2, **sizes))
    assert (config.architecture, config.is_ours) == ("LlavaForConditionalGeneration", False)
    assert (config.layers, config.hidden_size, config.kv_heads, config.vocab_size) == (5, 64, 2, 99)
    assert (config.head_dim, config.intermediate_size, config.eos_token_ids) == (16, 256, frozenset({7}))
    assert config.fitting_tps() == (1, 2, 4)
    with pytest.raises(ConfigError, match="one of 1, 2, 4 for a model of 4 query heads and 2 KV heads, got 3"):
        config.check_tp(3)
    with pytest.raises(CheckpointError, match="others by another engine: engine"):
        ModelConfig.load(tmp_path)


def test_what_the_text_part_leaves_out_is_its_familys(tmp_path: Path) -> None:
    config = ModelConfig.of_any(nested(tmp_path, model_type="mistral", vocab_size=32064))
    assert (config.layers, config.heads, config.kv_heads, config.vocab_size) == (32, 32, 8, 32064)


def test_sizes_may_have_the_names_of_older_models(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_positions": 128}))
    found = ModelConfig.of_any(tmp_path)
    assert (found.layers, found.heads, found.max_position_tokens) == (3, 4, 128)


def test_a_model_of_ours_is_read_as_ever_and_a_quantised_one_is_for_another_engine(tmp_path: Path) -> None:
    assert ModelConfig.of_any(changed(tmp_path)) == ModelConfig.load(changed(tmp_path))
    quantised = ModelConfig.of_any(changed(tmp_path, quantization_config={"quant_method": "awq"}))
    assert (quantised.is_ours, quantised.layers) == (False, 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["X"]}, "num_attention_heads: expected a positive integer, got None"),
        ({"architectures": []}, "architectures: expected a list with a name"),
        ({"architectures": "X"}, "architectures: expected a list with a name"),
    ],
)
def test_what_has_no_sizes_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.of_any(tmp_path)


def test_the_files_that_say_how_images_are_read_count_for_the_fingerprint(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    before = fingerprint(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    assert fingerprint(folder) != before
