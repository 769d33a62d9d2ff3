"""One prefill and one decode worker on the same GPU: real processes, and the tokens of one engine alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.testing.live import live_pair
from tandem.config.spec import EngineSpec, TransportKind
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from worker.testing.session import ManualRouter

pytestmark = pytest.mark.gpu
VOCAB = 300
LENGTHS = (1, 17, 100, 333)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=20)
SHARED: dict[str, Any] = {"device": "cuda:0", "device_share": 0.2, "kv_blocks": 256, "max_model_tokens": 400}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, head_dim=64, seed=1)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", [TransportKind.AUTO, TransportKind.TCP])
def test_a_handoff_on_one_gpu_gives_the_tokens_of_one_engine(
    model_dir: Path, tmp_path: Path, short_folder: Path, dtype: str, transport: TransportKind
) -> None:
    engine = EngineSpec(**SHARED, dtype=dtype)
    alone = EngineDriver(single_rank(model_dir, tmp_path / "alone", **SHARED, dtype=dtype).engine)
    for length in LENGTHS:
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            alone.add(f"{name}-{length}", random_prompt(length, VOCAB, length), sampling)
            alone.run()

    async def check() -> None:
        hand = ManualRouter()
        async with live_pair(
            short_folder, model_dir, rank_module="cluster.backends.rank_process", engine=engine, transport=transport
        ) as pair:
            for length in LENGTHS:
                for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
                    answer = await hand.handoff(
                        pair.prefill, pair.decode, random_prompt(length, VOCAB, length), sampling
                    )
                    assert answer.tokens == alone.tokens[f"{name}-{length}"], (name, length)
            (link,) = (await pair.prefill.state()).links
            assert link.transport == ("mapped" if transport is TransportKind.AUTO else "tcp"), link.reason

    asyncio.run(check())
