"""Tasks of the controller's life: an error is logged, counted, and not the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cluster import tasks
from cluster.tasks import keep_running, task_failures


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "RESTART_DELAY_S", 0.001)
    task_failures.clear()
    yield
    task_failures.clear()


async def test_a_task_that_fails_is_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise LookupError("a bug")

    async with asyncio.timeout(60):
        await keep_running("drainer", run)
    assert (runs, dict(task_failures)) == (3, {"drainer": 2})
    assert "drainer: failed" in caplog.text
    assert "LookupError: a bug" in caplog.text


async def test_it_ends_when_it_is_cancelled() -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_running("drainer", run))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not task_failures
