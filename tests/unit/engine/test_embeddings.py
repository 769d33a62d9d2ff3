"""A prompt's embedding is the last hidden state of the model, whatever is computed beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tandem.engine.api import Capability
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank
from tandem.errors import InputError
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama

VOCAB = 300
EMBEDS = SamplingParams(temperature=0.0, max_tokens=1, embeds=True)
LENGTHS = (1, 15, 16, 17, 100)


def expected(model_dir: Path, prompt: list[int]) -> Any:
    """What `transformers` computes."""
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()


def check(driver: EngineDriver, model_dir: Path) -> None:
    for length in LENGTHS:
        driver.add(f"embeds {length}", random_prompt(length, VOCAB, length), EMBEDS)
        driver.add(f"answers {length}", random_prompt(length, VOCAB, length), SamplingParams(seed=1, max_tokens=6))
    driver.run()
    assert driver.at_rest()
    assert driver.embeddings.keys() == {f"embeds {length}" for length in LENGTHS}
    for length in LENGTHS:
        found = np.frombuffer(driver.embeddings[f"embeds {length}"], dtype="<f4")
        np.testing.assert_allclose(found, expected(model_dir, random_prompt(length, VOCAB, length)), atol=2e-4)


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"speculation": "lookup"}], ids=str)
def test_embeddings_are_those_of_the_reference(
    make: Callable[..., Rank], model_dir: Path, options: dict[str, object]
) -> None:
    driver = EngineDriver(make(**options).engine)
    check(driver, model_dir)
    driver.embeddings.clear()
    check(driver, model_dir)  # again, behind cached prefixes


def test_a_device_embeds_beside_steps_that_it_recorded(model_dir: Path, tmp_path: Path) -> None:
    paged = PagedPath(plain_attention, EagerRecorder())
    check(EngineDriver(single_rank(model_dir, tmp_path / "a", paged=paged).engine), model_dir)


def test_an_embedding_has_an_answer_of_one_token() -> None:
    with pytest.raises(InputError, match="max_tokens: expected 1 with an embedding, got 2"):
        SamplingParams.parse(seed=0, max_tokens=2, embeds=True)


def test_a_checkpoint_without_the_model_around_it_is_read(tmp_path: Path) -> None:
    """As sentence-transformers writes them."""
    whole, body = (write_tiny_llama(tmp_path / name, vocab=VOCAB, seed=1, tie=True) for name in ("whole", "body"))
    tensors = {name.removeprefix("model."): each for name, each in load_file(whole / "model.safetensors").items()}
    save_file(tensors, body / "model.safetensors")
    (body / "1_Pooling").mkdir()
    (body / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    check(EngineDriver(single_rank(body, tmp_path / "a").engine), whole)


@pytest.mark.parametrize("why", ["pooling", "dense", "both directions"])
def test_a_checkpoint_whose_embeddings_are_others_gives_none(tmp_path: Path, why: str) -> None:
    model = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=1)
    if why == "pooling":
        (model / "1_Pooling").mkdir()
        (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    elif why == "dense":
        (model / "2_Dense").mkdir()
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    assert Capability.EMBEDDINGS not in single_rank(model, tmp_path / "a").engine.can
