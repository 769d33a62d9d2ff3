"""One tiny model for the engine's tests, what `transformers` says of it, and ranks of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.factory import Rank
from tandem.testing.engine import single_rank
from tandem.testing.models import write_tiny_llama
from tests.conftest import Reference

VOCAB = 300


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, seed=1)


@pytest.fixture
def reference(reference_for: Callable[[Path], Reference], model_dir: Path) -> Reference:
    return reference_for(model_dir)


@pytest.fixture
def make(model_dir: Path, tmp_path: Path) -> Callable[..., Rank]:
    return lambda **options: single_rank(model_dir, tmp_path / "rendezvous", **options)
