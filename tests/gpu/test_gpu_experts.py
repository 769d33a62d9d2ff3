"""Models with experts on a GPU: no shape of a decode step depends on the choice of experts, so that it is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath, changing_shapes
from tandem.model.experts import grouped_error
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import write_family

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
HALF: dict[str, Any] = {"device": "cuda:0", "dtype": "bfloat16", "max_running_requests": 11, "max_model_tokens": 400}


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="torch's grouped product makes the host wait on GPUs before Hopper",
)
def test_steps_of_experts_are_recorded_and_nearly_agree_with_launched_ones(tmp_path: Path) -> None:
    """Rounding decides some tokens, after which an answer is another: most first halves must be the same."""
    assert grouped_error(torch.Size((64, 64)), torch.bfloat16, CUDA) is None
    model_dir = write_family(tmp_path / "moe", "qwen3_moe")
    tokens = []
    for paged in (PagedPath(plain_attention, None), None):
        rank = single_rank(model_dir, tmp_path / "r", paged=paged, **HALF)
        assert changing_shapes(rank.runner._model) is None
        assert (rank.runner.graphs is None) == (paged is not None)
        driver = EngineDriver(rank.engine)
        for number in range(9):
            prompt = random_prompt(1 + 31 * number % 150, 300, number)
            driver.add(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=20))
        driver.run()
        assert driver.at_rest()
        tokens.append(driver.tokens)
    assert sum(tokens[0][name][:6] == tokens[1][name][:6] for name in tokens[0]) >= 6
