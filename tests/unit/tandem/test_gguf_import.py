"""Tiny GGUF files, written with the gguf library from tiny Hugging Face checkpoints, come back as those checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tandem.checkpoint.gguf_import import import_gguf
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import quiet, resolve
from tandem.checkpoint.rope_config import LinearScaling, Llama3Scaling
from tandem.errors import CheckpointError, InsufficientMemory
from tandem.testing.models import CHAT_TEMPLATE, write_tiny_llama
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

Change = Callable[[gguf.GGUFWriter], object]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{NAMES[stem]}.weight"
    return f"{NAMES[stem]}.weight"


def permuted(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """As llama.cpp's converter interleaves the rows of q and k."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    source: Path,
    *,
    kind: Kind = Kind.F32,
    pre: str = "gpt-2",
    add_bos: bool | None = False,
    architecture: str = "llama",
    change: Change = lambda writer: None,
) -> Path:
    config = ModelConfig.load(source)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.traits.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokenizer["model"]["vocab"]))
    writer.add_token_types([3 if each < 3 else 1 for each in range(config.vocab_size)])
    writer.add_token_merges([" ".join(each) for each in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in load_file(source / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            array = permuted(array, config.heads)
        elif name.endswith("k_proj.weight"):
            array = permuted(array, config.kv_heads)
        stored = Kind.F32 if array.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quantize(array, stored), raw_dtype=stored)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imported(path: Path) -> Path:
    folder = path.parent / "imported"
    folder.mkdir()
    import_gguf(path, folder, quiet)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("tie", [False, True])
def test_a_float_file_gives_the_same_checkpoint(tie: bool, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", bos_token_id=1, eos_token_id=2, tie=tie)
    folder = imported(write_gguf(tmp_path / "m.gguf", source))

    assert ModelConfig.load(folder) == ModelConfig.load(source)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    text = "Hello wörld 123"
    assert Tokenizer.load(folder).encode(text, add_special_tokens=True) == Tokenizer.load(source).encode(
        text, add_special_tokens=True
    )
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user\nHi")


def test_a_file_is_converted_once_and_again_when_it_changed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", source)
    steps: list[str] = []
    folder = resolve(str(path), progress=steps.append)
    assert resolve(str(path), progress=steps.append) == folder
    assert steps == ["reading m.gguf", "converting m.gguf to safetensors"]

    write_gguf(path, source, kind=Kind.Q8_0)
    assert resolve(str(path)) != folder
    assert not list((tmp_path / "cache" / "gguf").glob(".building-*"))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_weights_come_out_as_what_their_numbers_say(kind: Kind, source: Path, tmp_path: Path) -> None:
    folder = imported(write_gguf(tmp_path / "m.gguf", source, kind=kind))
    name = "model.layers.0.mlp.up_proj.weight"
    original = load_file(source / "model.safetensors")[name]
    expected = gguf.dequantize(gguf.quantize(original, kind), kind)
    assert np.array_equal(load_file(folder / "model.safetensors")[name], expected)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_come_out_as_what_their_numbers_say(kind: Kind, tmp_path: Path) -> None:
    """The library only reads K-quants, so a block of its bytes is made by hand: half-precision scales, small codes."""
    source = write_tiny_llama(tmp_path / "source", hidden=256, head_dim=64, intermediate=256, layers=1)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 48, (256, 256 // block_values * block_bytes), dtype=np.uint8)
    name = "blk.0.ffn_up.weight"

    def change(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[0][name]
        writer.add_tensor(name, raw, raw_dtype=kind)

    folder = imported(write_gguf(tmp_path / "m.gguf", source, change=change))
    up = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up, gguf.dequantize(raw, kind))


def test_a_file_whose_weights_have_no_room_is_refused_before_one_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8_0 has 34 bytes for 32 weights; widened they have 128."""
    path = write_gguf(tmp_path / "m.gguf", source, kind=Kind.Q8_0)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=2 * path.stat().st_size))
    with pytest.raises(InsufficientMemory, match=r"model: expected .* free in .* for m\.gguf, got "):
        imported(path)
    assert not list((tmp_path / "imported").glob("*.safetensors"))


def test_half_precision_stays_half_precision(source: Path, tmp_path: Path) -> None:
    folder = imported(write_gguf(tmp_path / "m.gguf", source, kind=Kind.F16))
    ours = load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    original = load_file(source / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert ours.dtype == np.float16
    assert np.array_equal(ours, original.astype(np.float16))


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_text_survives_each_tokenizer_kind(pre: str, source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(imported(write_gguf(tmp_path / "m.gguf", source, pre=pre)))
    text = "It's 1234 wörds,\n\n  and <|im_end|> more"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_bos_token_goes_before_a_bare_prompt_where_the_file_says_so(source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(imported(write_gguf(tmp_path / "m.gguf", source, add_bos=True)))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_llama3_adds_a_bos_token_where_the_file_does_not_say(source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(imported(write_gguf(tmp_path / "m.gguf", source, pre="llama-bpe", add_bos=None)))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 1


def test_linear_rope_scaling_is_kept(source: Path, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    folder = imported(write_gguf(tmp_path / "m.gguf", source, change=change))
    assert ModelConfig.load(folder).traits.rope.scaling == LinearScaling(4.0)


def llama3_factors(theta: float, head_dim: int) -> NDArray[np.float32]:
    """As llama.cpp's converter computes them from factor 32, low 1, high 4, original context 8192."""
    factors = []
    for each in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / each
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / 32 + smooth)
        factors.append(1.0 if wavelength < 2048 else 32.0 if wavelength > 8192 else between)
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_scaling_is_found_again_from_its_divisors(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", head_dim=64, rope_theta=500_000.0)
    factors = llama3_factors(500_000.0, 64)
    path = write_gguf(
        tmp_path / "m.gguf", source, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    assert ModelConfig.load(imported(path)).traits.rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen3"}, "general.architecture: expected llama, got 'qwen3'"),
        ({"pre": "made-up"}, "tokenizer.ggml.pre: expected a byte-level BPE"),
        ({"change": lambda w: w.add_expert_count(8)}, "llama.expert_count: expected 0"),
        ({"change": lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))}, "blk.0.attn_q.bias"),
        ({"change": lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3, np.float32))}, "rope_freqs.weight"),
        ({"change": lambda w: w.tensors[0].pop("blk.1.ffn_up.weight")}, "tensors: expected 21 for 2 layers, got 20"),
        ({"change": lambda w: w.tensors[0].pop("token_embd.weight")}, "token_embd.weight: expected this tensor"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_name(
    options: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", source, **options)
    with pytest.raises(CheckpointError) as caught:
        imported(path)
    assert message in caught.value.message
    assert "m.gguf" in caught.value.message


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.01, 0.05, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_its_name(kept: float, source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", source)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=r"m\.gguf: expected an intact GGUF file"):
        imported(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_header_never_ends_in_anything_but_a_checkpoint_error(
    seed: int, source: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", source)
    damaged = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    for at in rng.integers(0, 600, 8):
        damaged[at] = int(rng.integers(0, 256))
    path.write_bytes(bytes(damaged))
    refusal: str | None = None
    try:
        folder = imported(path)
    except CheckpointError as error:
        refusal = error.message
    if refusal is None:
        ModelConfig.load(folder)  # the damage hit nothing that matters
    else:
        assert "m.gguf" in refusal
