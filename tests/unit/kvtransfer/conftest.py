from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.testing.cluster import FakeCluster
from kvtransfer.testing.worker import FakeModel, FakeWorker

MakeWorker = Callable[..., FakeWorker]


@pytest.fixture
def make_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeWorker]:
    """`make_worker("decode-0", model, tp=2)`: a fake worker whose agents are stopped at the end."""
    folder: Path = tmp_path_factory.mktemp("k")
    workers: list[FakeWorker] = []

    def make(worker_id: str, model: FakeModel | None = None, **options: Any) -> FakeWorker:
        worker = FakeWorker(folder, worker_id, model or FakeModel(), **options)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeCluster]:
    """A fake cluster without workers yet; it is stopped at the end."""
    fake = FakeCluster(tmp_path_factory.mktemp("c"))
    yield fake
    await fake.stop()


@pytest.fixture(scope="session")
def soak() -> Callable[[int, int], int]:
    """`soak(full, short)`: the full count when TANDEM_SOAK is set, else the short one."""

    def choose(full: int, short: int) -> int:
        return full if os.environ.get("TANDEM_SOAK") else short

    return choose
