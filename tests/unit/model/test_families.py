"""Every family against `transformers`' own, on tiny random checkpoints that `transformers` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.rope_config import LongRopeScaling, RopeConfig
from tandem.engine.attention.attention import StepAttention
from tandem.engine.kv_pool import KvPool
from tandem.engine.step import SequenceStep
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.parallel import TensorParallel
from tandem.model.rope import scaled_frequencies
from tandem.model.weights import load_model
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference

PROMPT = random_prompt(100, 320)  # longer than every window of these checkpoints
BLOCKS = [5, 2, 7, 1, 6, 3, 4]


def logits(folder: Path, tp: TensorParallel) -> Tensor:
    """[100, vocab] of PROMPT in chunks that end inside blocks."""
    config = ModelConfig.load(folder)
    model = load_model(folder, config, tp, "cpu", torch.float32)
    layout = KvPoolLayout(8, config.layers, config.rank_kv_heads(tp.size), 16, config.head_dim, "float32")
    pool = KvPool(layout, torch.device("cpu"))
    rows: list[Tensor] = []
    with torch.inference_mode():
        for start, end in ((0, 40), (40, 99), (99, 100)):
            sequence = SequenceStep(token_ids=PROMPT[start:end], start=start, blocks=BLOCKS, samples=1)
            attend = StepAttention(pool.tensor, layout, [sequence], model.attention)
            places = torch.arange(start, end)
            rows.append(model.forward(torch.tensor(PROMPT[start:end]), places, places - start, attend))
    return torch.cat(rows)


def test_logits_equal_those_of_transformers(family_dir: Path, reference_for: Callable[[Path], Reference]) -> None:
    expected = reference_for(family_dir).logits(PROMPT)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(family_dir, TensorParallel()), expected, atol=2e-3, rtol=1e-4)


def test_two_ranks_together_give_the_logits_of_one(family_dir: Path) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank(number: int) -> Tensor:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        return logits(family_dir, TensorParallel(number, 2, group))  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rank, range(2)))

    whole = logits(family_dir, TensorParallel())
    for each in both:
        torch.testing.assert_close(each, whole, atol=2e-3, rtol=1e-4)


def test_long_factors_serve_contexts_beyond_the_original_and_short_ones_within_it() -> None:
    scaling = LongRopeScaling((1.0, 1.0), (2.0, 4.0), original_max_position_tokens=64, attention_factor=1.0)
    config = RopeConfig(theta=10_000.0, dims=4, scaling=scaling)
    plain = scaled_frequencies(RopeConfig(theta=10_000.0, dims=4), 64)
    assert scaled_frequencies(config, 64).tolist() == plain.tolist()
    assert scaled_frequencies(config, 65).tolist() == (plain / torch.tensor([2.0, 4.0])).tolist()


def test_experts_that_no_rank_can_share_evenly_are_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"tp: expected one of 1 for a model of .* and 3 experts, got 2"):
        ModelConfig.load(folder).check_tp(2)
