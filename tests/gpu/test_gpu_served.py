"""A prefill and a decode worker on one GPU or two: real processes, and the tokens of one engine alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.testing.live import live_pair
from tandem.config.engine import EngineOverrides, EngineSpec
from tandem.config.transfer import TransportKind
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.gpu.conftest import DEVICE, NEEDS_TWO, ON_GPU, VOCAB
from worker.testing.session import ManualRouter

pytestmark = pytest.mark.gpu
LENGTHS = (1, 17, 100, 333)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=20)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
SHARED: dict[str, Any] = {"device": str(DEVICE), "kv_blocks": 256, "max_model_tokens": 400}
SHARED |= {"device_share": 0.2} if ON_GPU else {}
RANK_MODULE = "cluster.backends.rank_process" if ON_GPU else "cluster.testing.device_rank"


def tokens_alone(model_dir: Path, folder: Path, dtype: str) -> dict[str, list[int]]:
    alone = EngineDriver(single_rank(model_dir, folder / "alone", **SHARED, dtype=dtype).engine)
    for length in LENGTHS:
        for name, sampling in SAMPLINGS.items():
            alone.add(f"{name}-{length}", random_prompt(length, VOCAB, length), sampling)
            alone.run()
    return alone.tokens


def check_handoffs(expected: dict[str, list[int]], carried: str, *where: Any, **options: Any) -> None:
    """Answers of a prefill and a decode worker have the expected tokens, and transport `carried` moved the blocks."""

    async def check() -> None:
        hand = ManualRouter()
        async with live_pair(*where, rank_module=RANK_MODULE, **options) as pair:
            for length in LENGTHS:
                for name, sampling in SAMPLINGS.items():
                    answer = await hand.handoff(
                        pair.prefill, pair.decode, random_prompt(length, VOCAB, length), sampling
                    )
                    assert answer.tokens == expected[f"{name}-{length}"], (name, length)
            links = (await pair.prefill.state()).links
            assert {link.transport for link in links} == {carried}, [link.reason for link in links]

    asyncio.run(check())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", [TransportKind.AUTO, TransportKind.TCP])
def test_a_handoff_on_one_gpu_gives_the_tokens_of_one_engine(
    model_dir: Path, tmp_path: Path, short_folder: Path, dtype: str, transport: TransportKind
) -> None:
    carried = "mapped" if transport is TransportKind.AUTO else "tcp"
    engine = EngineSpec(**SHARED, dtype=dtype)
    expected = tokens_alone(model_dir, tmp_path, dtype)
    check_handoffs(expected, carried, short_folder, model_dir, engine=engine, transport=transport)


@NEEDS_TWO
@pytest.mark.parametrize("transport", [TransportKind.AUTO, TransportKind.NCCL])
def test_a_handoff_between_two_gpus_gives_the_tokens_of_one_engine(
    model_dir: Path, tmp_path: Path, short_folder: Path, transport: TransportKind
) -> None:
    carried = "mapped" if transport is TransportKind.AUTO else "nccl"
    check_handoffs(
        tokens_alone(model_dir, tmp_path, "bfloat16"), carried, short_folder, model_dir,
        engine=EngineSpec(**SHARED, dtype="bfloat16"),
        decode_engine=EngineOverrides.model_validate({"device": "cuda:1"}), transport=transport,
    )  # fmt: skip


@NEEDS_TWO
@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (2, 2)])
def test_two_ranks_on_two_gpus_give_the_tokens_of_one(
    model_dir: Path, tmp_path: Path, short_folder: Path, widths: tuple[int, int]
) -> None:
    """In fp32, where sums of two ranks choose the same tokens. NCCL between ranks, CUDA IPC and reshards between
    workers."""
    engine = EngineSpec(**SHARED | {"device": "cuda"}, dtype="float32")
    check_handoffs(
        tokens_alone(model_dir, tmp_path, "float32"), "mapped", short_folder, model_dir, engine=engine,
        prefill_tp=widths[0], decode_tp=widths[1],
    )  # fmt: skip
