"""These tests need a GPU and are not selected without one. On a machine that has one but not all of Tandem's needs:

python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib tests/gpu
"""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")  # without our pyproject.toml, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unfit = [item for item in items if item.get_closest_marker("gpu") and not HAS_GPU]
    if unfit:
        items[:] = [item for item in items if item not in unfit]
        config.hook.pytest_deselected(items=unfit)
