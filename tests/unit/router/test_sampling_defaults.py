"""Sampling of requests that say nothing about it: the checkpoint's, or OpenAI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.requests.serving_model import sampling_defaults
from tandem.errors import CheckpointError
from tandem.testing.models import write_tiny_llama
from tests.unit.router.conftest import Cluster

EOS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), max_positions=2048, eos_token_id=EOS)
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [EOS]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


async def test_the_checkpoints_are_taken_where_the_client_says_nothing(cluster: Cluster) -> None:
    await cluster.openai.completions.create(model="tiny", prompt="a", top_p=0.5)
    [work] = cluster.decode.works.values()
    sampling = work.sampling
    assert (round(sampling.temperature, 5), sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)
    await cluster.openai.completions.create(model="tiny", prompt="a", extra_body={"top_k": -1})
    assert [*cluster.decode.works.values()][-1].sampling.top_k == 0, "no limit was asked for"
    answer = await cluster.openai.responses.create(model="tiny", input="a")
    assert answer.temperature == 0.6, "what was used"


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 2}, []])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)
