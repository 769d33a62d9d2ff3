from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.testing import FakeModel, FakeWorker

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
