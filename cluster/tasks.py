"""Groups of asyncio tasks that start together, and tasks that must not fail unseen.

`task_failures` counts the unexpected errors of this process by task; `tandem status` shows them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

log = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0

task_failures: Counter[str] = Counter()


def count_failure(task: str, what: str) -> None:
    """Logs and counts the exception that is being handled."""
    task_failures[task] += 1
    log.exception("%s: %s", task, what)


async def keep_running(task: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs it until it returns. An exception is logged and counted, and it is run again after a moment."""
    while True:
        try:
            return await run()
        except Exception:
            count_failure(task, f"failed; starting it again in {RESTART_DELAY_S:g} s")
        await asyncio.sleep(RESTART_DELAY_S)


async def run_together(*parts: Coroutine[Any, Any, object]) -> None:
    """Runs all parts. If one fails, cancels the others, waits for them and raises that error."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def raise_failure(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raises the exception of the first task that failed, so that a start does not wait for its timeout."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
