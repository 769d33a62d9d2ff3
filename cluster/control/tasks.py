"""Groups of asyncio tasks that start together, and tasks that must not fail unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


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
