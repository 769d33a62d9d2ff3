"""Fields that all log lines of a task share: the request it serves, and that request's trace."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from contextvars import ContextVar

Names = Mapping[str, str]
_Named = tuple["weakref.ref[asyncio.Task[object]]", Names]

_NOTHING: Names = {}
_named: ContextVar[_Named | None] = ContextVar("log_names", default=None)


def name_logs(names: Names) -> None:
    """Sets the fields of the current task's log lines. Tasks and timers it schedules do not inherit them, because a
    timer that one request set may serve others."""
    if (task := asyncio.current_task()) is not None:
        _named.set((weakref.ref(task), names))


def log_names() -> Names:
    named = _named.get()
    if named is None:
        return _NOTHING
    try:
        task = asyncio.current_task()
    except RuntimeError:  # this thread has no running event loop
        return _NOTHING
    return named[1] if task is not None and named[0]() is task else _NOTHING
