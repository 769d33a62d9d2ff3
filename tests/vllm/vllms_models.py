"""Small models with random weights that Tandem's own engine does not run, and what vLLM itself answers with them.

python -m tests.vllm.vllms_models FOLDER: answers the prompts on its standard input, as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedTokenizerFast,
)

END, MARKER = "<end_of_utterance>", "<image>"
SPECIAL = ["<|im_start|>", END, MARKER, "<fake_token_around_image>", "<global-img>"]
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCK_TOKENS, CONTEXT = 32, 512


def _tokenizer() -> Any:
    bytes_of = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(bytes_of, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, *TILES)])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)  # type: ignore[no-untyped-call]
    fast.chat_template = TEMPLATE
    return fast


def _write(folder: Path, model: Any, tokenizer: Any) -> Path:
    """With weights from which answers vary."""
    torch.manual_seed(0)
    for name, weights in model.named_parameters():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            weights.data.fill_(1.0)
        else:
            weights.data.normal_(0.0, 0.08 if weights.dim() > 1 else 0.02)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_gpt2(folder: Path) -> Path:
    """Learned positions, and sizes by other names than ours."""
    tokenizer = _tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return _write(folder, GPT2LMHeadModel(config), tokenizer)


def _sizes(tokenizer: Any) -> dict[str, Any]:
    """With heads of 32, the smallest that vLLM's attention on CPUs takes, two for each KV head."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def write_olmo(folder: Path) -> Path:
    """Norms without weights."""
    tokenizer = _tokenizer()
    return _write(folder, OlmoForCausalLM(OlmoConfig(**_sizes(tokenizer))), tokenizer)


def write_gemma3(folder: Path) -> Path:
    """A window of 64 tokens in the first of two layers."""
    tokenizer = _tokenizer()
    config = Gemma3TextConfig(
        **_sizes(tokenizer),
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    )
    return _write(folder, Gemma3ForCausalLM(config), tokenizer)


def write_mistral(folder: Path) -> Path:
    """A window of 64 tokens in every layer."""
    tokenizer = _tokenizer()
    config = MistralConfig(**_sizes(tokenizer), sliding_window=64)
    return _write(folder, MistralForCausalLM(config), tokenizer)


def write_image_model(folder: Path) -> Path:
    """An image becomes 32 tokens, some of them text between the embeddings of its four tiles and of the whole."""
    fast = _tokenizer()
    text = LlamaConfig(**_sizes(fast))
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=fast.convert_tokens_to_ids(MARKER),
        scale_factor=2,
    )
    _write(folder, Idefics3ForConditionalGeneration(config), fast)
    half = [0.5, 0.5, 0.5]
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "do_image_splitting": True,
                "image_mean": half,
                "image_std": half,
                "max_image_size": {"longest_edge": 32},
                "size": {"longest_edge": 64},
            }
        )
    )
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4})
    )
    return folder


def picture(seed: int, width: int = 50, height: int = 40, kind: str = "PNG") -> bytes:
    """A file with noise."""
    return _file(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8), kind)


def blank(width: int, height: int) -> bytes:
    """A small file with many pixels."""
    return _file(np.zeros((height, width, 3), dtype=np.uint8), "PNG")


def _file(pixels: Any, kind: str) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


async def alone(folder: Path, asked: list[dict[str, Any]]) -> list[list[int]]:
    """As `answer`, by a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(folder),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0, errors.decode()[-2000:]
    found: list[list[int]] = json.loads(said)
    return found


def answer(folder: str, asked: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy, by vLLM alone. Each has `prompt`, the token ids with markers, `images` in base64, and `tokens`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=CONTEXT,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=1,
    )
    found = []
    for each in asked:
        images = [Image.open(BytesIO(base64.b64decode(file))).convert("RGB") for file in each["images"]]
        prompt: dict[str, Any] = {"prompt_token_ids": each["prompt"]}
        if images:
            prompt["multi_modal_data"] = {"image": images}
        sampling = SamplingParams(temperature=0.0, max_tokens=each["tokens"], ignore_eos=True)
        (done,) = llm.generate(prompt, sampling, use_tqdm=False)
        found.append([*done.outputs[0].token_ids])
    return found


if __name__ == "__main__":
    said = sys.stdout
    sys.stdout = sys.stderr  # vLLM writes there
    answers = answer(sys.argv[1], json.load(sys.stdin))
    said.write(json.dumps(answers))
    said.flush()
    os._exit(0)
