"""These tests need a GPU and are not selected without one. On a machine that has one but not all of Tandem's needs:

python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib tests/gpu

With TANDEM_GPU_TESTS_ON=cpu, those that need nothing of CUDA's run on the CPU, which shows that they run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.device.graph_recorder import CudaGraphRecorder, GraphRecorder
from tandem.testing.engine import EagerRecorder
from tandem.testing.models import write_tiny_llama

DEVICE = torch.device(os.environ.get("TANDEM_GPU_TESTS_ON", "cuda:0"))
ON_GPU = DEVICE.type == "cuda"
CAN_RUN = torch.cuda.is_available() or not ON_GPU
NEEDS_CUDA = pytest.mark.skipif(not ON_GPU, reason="needs CUDA itself")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
VOCAB = 300


def make_recorder() -> GraphRecorder:
    return CudaGraphRecorder(DEVICE) if ON_GPU else EagerRecorder()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, head_dim=64, seed=1)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Unix sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        yield Path(folder)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")  # without our pyproject.toml, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unfit = [item for item in items if item.get_closest_marker("gpu") and not CAN_RUN]
    if unfit:
        items[:] = [item for item in items if item not in unfit]
        config.hook.pytest_deselected(items=unfit)
