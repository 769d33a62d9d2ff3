"""Workers whose engine is vLLM, in an environment that has it: make test-vllm."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tandem.config.engine import EngineSpec
from tandem.config.launch import WorkerLaunch
from tandem.config.model import ModelSpec, Role
from tandem.config.transfer import TransferSpec
from tandem.scheduler.plan import ExportRange
from tandem.testing.models import write_tiny_llama
from tandem.vllm_engine.launch import build_vllm_rank
from tests.integration.conftest import forks, pair, routed, short_folder

if TYPE_CHECKING:
    from tandem.vllm_engine.rank import VllmRank

__all__ = ["forks", "pair", "routed", "short_folder"]

ENGINE = EngineSpec(kind="vllm", block_tokens=32, kv_blocks=64, max_model_tokens=512, max_step_tokens=64)
VOCAB = 300
# As in the image: no compiler, and nothing that was compiled before.
NOTHING_COMPILED = tempfile.TemporaryDirectory(prefix="tandem-inductor-")
os.environ |= {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": NOTHING_COMPILED.name}


class Exporter:
    """Keeps what a rank reports to its transfer agent, by request."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[ExportRange]] = {}
        self.layers: list[int] = []

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        for each in ranges:
            self.ranges.setdefault(each.request_id, []).append(each)

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the smallest heads that vLLM's attention on CPUs takes."""
    return write_tiny_llama(tmp_path_factory.mktemp("vllm") / "tiny", head_dim=32)


@pytest.fixture(scope="session")
def exporter() -> Exporter:
    return Exporter()


@pytest.fixture(scope="session")
def rank(model_dir: Path, exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRank]:
    """One vLLM in this process, which can have only one."""
    model = ModelSpec(source=str(model_dir), engine=ENGINE)
    launch = WorkerLaunch(
        cluster="test",
        worker_id="decode-0",
        epoch=1,
        role=Role.DECODE,
        model=model,
        engine=ENGINE,
        model_dir=str(model_dir),
        transfer=TransferSpec(),
        controller_address="127.0.0.1:1",
        redis_url=None,
        run_dir=str(tmp_path_factory.mktemp("rank")),
    )
    made = build_vllm_rank(launch, 0, exporter)
    yield made
    made.close()
