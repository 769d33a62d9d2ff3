"""Values that are not finite in free cells, or in those of another request, reach no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FREE = {"auto": torch.nan, "fp8": 0x7F}  # fp8 pools are written as bytes: e4m3's NaN


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_what_is_not_finite_in_a_pool_stays_there(tmp_path: Path, kv_dtype: str, kernels: str) -> None:
    """torch's attention gathers whole blocks, and pads shorter requests with a block of another."""
    model = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=1)
    answers = []
    for name in ("clean", "poisoned"):
        rank = single_rank(model, tmp_path / name, kernels=kernels, kv_dtype=kv_dtype)
        if name == "poisoned":
            pool = rank.pool.tensor
            (pool.view(torch.uint8) if kv_dtype == "fp8" else pool).fill_(FREE[kv_dtype])
        driver = EngineDriver(rank.engine)
        for length in (3, 40, 17):
            driver.add(str(length), random_prompt(length, VOCAB, length), GREEDY)
        driver.run()
        answers.append(driver.tokens)
    assert answers[0] == answers[1]
    assert {len(tokens) for tokens in answers[1].values()} == {12}
