"""Live workers for the integration tests (see `worker.testing_live`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from worker.testing_live import Pair, live_pair

StartPair = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def pair(short_folder: Path) -> StartPair:
    """`pair(model_dir, ...)`: one prefill and one decode worker, and a session with each."""
    return partial(live_pair, short_folder)


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private folder whose path leaves room for a unix socket's name (108 bytes in all)."""
    return tmp_path_factory.mktemp("w")
